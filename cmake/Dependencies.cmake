# Debian 12's packages; their traps are in docs/gotchas.md.

find_package(Threads REQUIRED)
find_package(Protobuf REQUIRED)  # module mode: Debian ships no protobuf-config.cmake
find_package(absl CONFIG REQUIRED)
find_package(gRPC CONFIG REQUIRED)
find_program(GRPC_CPP_PLUGIN grpc_cpp_plugin REQUIRED)
find_package(CLI11 CONFIG REQUIRED)
find_package(nlohmann_json CONFIG REQUIRED)
if(DMUON_SERVER)
  find_package(yaml-cpp CONFIG REQUIRED)
endif()
if(DMUON_TESTS)
  find_package(GTest CONFIG REQUIRED)
endif()
