// A tree as YAML.
#ifndef DMUON_CLIENT_CTL_YAML_H_
#define DMUON_CLIENT_CTL_YAML_H_

#include <nlohmann/json.hpp>
#include <string>

namespace dmuon::ctl {

// Block style, two spaces, keys in the tree's order, ends with a newline. Strings that YAML could take for something else
// are quoted as in JSON, of which YAML is a superset.
std::string ToYaml(const nlohmann::ordered_json& tree);

}  // namespace dmuon::ctl

#endif  // DMUON_CLIENT_CTL_YAML_H_
