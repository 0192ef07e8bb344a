"""What the step benchmark says of its figures: ratios to the faster peer and to the floor, and tables."""

from __future__ import annotations

from typing import Any

from benchmarks.sides import PARTS

__all__ = ["compare", "faster_peer", "table"]

# The floor's phases that are the least of a part; a reward costs nothing at least.
_FLOOR_OF = {"rollout": "rollout", "score": "score", "backward": "backward", "optimizer": "optimizer"}


def faster_peer(sides: dict[str, Any]) -> str | None:
    """The name of TRL's faster setting; None if it took no part."""
    peers = [name for name in sides if name.startswith("trl")]
    return min(peers, key=lambda name: sides[name]["median"]["seconds"], default=None)


def compare(report: dict[str, Any]) -> dict[str, Any]:
    """Ratios of a report.

    Args:
        report: With `sides` and `floor`.

    Returns:
        `measured_over_floor` of each side; with both `ours` and TRL also `peer`, the faster setting, `speedup`, its
        seconds over ours, and `memory_ratio`, our peak over its. With two settings of TRL the memory of the leaner one
        stands beside it, as `memory_ratio_to_leanest`.
    """
    sides = report["sides"]
    out: dict[str, Any] = {
        "measured_over_floor": {
            name: side["median"]["seconds"] / report["floor"]["total"] for name, side in sides.items()
        }
    }
    peer = faster_peer(sides)
    if peer is None or "ours" not in sides:
        return out
    ours = sides["ours"]
    leanest = min(side["peak_mib"] for name, side in sides.items() if name.startswith("trl"))
    return {
        **out,
        "peer": peer,
        "speedup": sides[peer]["median"]["seconds"] / ours["median"]["seconds"],
        "memory_ratio": ours["peak_mib"] / sides[peer]["peak_mib"],
        "memory_ratio_to_leanest": ours["peak_mib"] / leanest,
    }


def table(report: dict[str, Any]) -> str:
    """The report as lines for a terminal: seconds are medians, memory is the peak of the process in GiB."""
    heads = "".join(f"{part + ' s':>13}" for part in PARTS)
    lines = [report["work"], f"{'side':18}{'step s':>9}{heads}{'min..max s':>17}{'peak GiB':>10}{'/ floor':>9}"]
    for name, side in report["sides"].items():
        median, seconds = side["median"], [step["seconds"] for step in side["steps"]]
        parts = "".join(f"{median[part]:13.3f}" for part in PARTS)
        spread = f"{min(seconds):.2f}..{max(seconds):.2f}"
        ratio = report["measured_over_floor"][name]
        lines.append(f"{name:18}{median['seconds']:9.3f}{parts}{spread:>17}{side['peak_mib'] / 1024:10.2f}{ratio:9.2f}")
    least = report["floor"]
    parts = "".join(f"{least[_FLOOR_OF[part]]:13.3f}" if part in _FLOOR_OF else f"{0:13.3f}" for part in PARTS)
    lines.append(f"{'floor':18}{least['total']:9.3f}{parts}")
    ours = report["sides"].get("ours")
    if ours is not None and "callbacks" in ours["median"]:
        share = ours["median"]["callbacks"] / ours["median"]["seconds"]
        lines.append(f"the three parts of GTPO: {100 * share:.2f} % of our step")
    if "peer" in report:
        lines.append(
            f"against {report['peer']}, the faster setting: {report['speedup']:.2f} times its step rate, "
            f"{report['memory_ratio']:.3f} of its peak memory "
            f"({report['memory_ratio_to_leanest']:.3f} of its leanest setting's)"
        )
    return "\n".join(lines)
