"""Prints the demo's table and draws its plot, from the figures that train_lm.py wrote.

    demo_report.py MUON.json ADAMW.json PLOT.png

Ends with 1 when Muon's loss is not below AdamW's at the last row.
"""

import json
import pathlib
import sys

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def main() -> int:
    muon, adamw = (json.loads(pathlib.Path(p).read_text()) for p in sys.argv[1:3])
    print(f"Held-out loss (nats a byte), {muon['parameters']:,} parameters, same data and seed")
    print(f"{'step':>6}  {'Muon + AdamW':>14}  {'AdamW alone':>14}")
    for (step, a), (_, b) in zip(muon["losses"], adamw["losses"], strict=True):
        print(f"{step:6}  {a:14.4f}  {b:14.4f}")
    print(f"{'lr':>6}  {muon['lr']:14g}  {adamw['lr']:14g}")
    print("\nSeconds a step (rank 0)")
    print(f"{'':>10}  {'Muon + AdamW':>14}  {'AdamW alone':>14}")
    for phase in muon["seconds_per_step"]:
        print(f"{phase:>10}  {muon['seconds_per_step'][phase]:14.4f}  {adamw['seconds_per_step'][phase]:14.4f}")

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for run, label in ((muon, "Muon + AdamW (dmuon)"), (adamw, "AdamW alone")):
        axes.plot(*zip(*run["losses"], strict=True), marker="o", label=f"{label}, lr {run['lr']:g}")
    axes.set(xlabel="step", ylabel="held-out loss (nats a byte)", title="A small byte-level Llama, 2 ranks on CPU")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(sys.argv[3], dpi=120, bbox_inches="tight")

    if muon["losses"][-1][1] >= adamw["losses"][-1][1]:
        print("Muon's loss is not below AdamW's at the last row", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
