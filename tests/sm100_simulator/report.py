"""The counts of a run as text: instructions by role and class, bytes, and the issue-slot estimate."""

SUB_PARTITIONS = 4  # of an SM: warp i of a CTA issues from sub-partition i mod 4


def roles_of(kernel, roles):
    """[(name, warps of the report)]: `roles` maps a name to warp numbers of a CTA; without it, warps that executed the same
    opcodes share a role."""
    warps = kernel["warps"]
    if roles:
        return [(name, [w for w in warps if w["warp"] in set(numbers)]) for name, numbers in roles.items()]
    groups = {}
    for w in warps:
        groups.setdefault(tuple(sorted(w["opcodes"])), []).append(w)
    named = []
    for group in groups.values():
        numbers = sorted({w["warp"] for w in group})
        named.append(("warp " + ", ".join(map(str, numbers)), group))
    return named


def issue_slots(kernel, tiles=None):
    """Instructions that each sub-partition of an SM issues for one tile, or without `tiles` for one CTA."""
    share = tiles or kernel["clusters"] * kernel["cluster"]
    slots = [0.0] * SUB_PARTITIONS
    for w in kernel["warps"]:
        slots[w["warp"] % SUB_PARTITIONS] += sum(w["classes"].values()) / share
    return slots


def table(report, roles=None, tiles=None):
    """report: Simulator.report(). roles: {name: warp numbers}. tiles: how many tiles of one CTA the run computed (a CTA pair
    computes two at a time); the counts are then per tile, and the issue slots stand against the tensor-core cycles that they
    must hide under. PTX instructions are counted: what ptxas makes of them differs by some per cent."""
    lines = []
    for name, kernel in report.items():
        per = f" per tile ({tiles} tiles)" if tiles else ""
        lines += [f"{name}: {kernel['launches']} launches, {kernel['clusters']} clusters of {kernel['cluster']}{per}"]
        scale = 1 / (tiles or 1)
        named = roles_of(kernel, roles)
        classes = sorted({c for w in kernel["warps"] for c in w["classes"]})
        width = max([len(n) for n, _ in named] + [4])
        lines += [f"  {'role':{width}}  warps " + " ".join(f"{c:>9}" for c in [*classes, "all"])]
        for role, group in named:
            sums = [sum(w["classes"].get(c, 0) for w in group) * scale for c in classes]
            lines += [f"  {role:{width}}  {len(group):5} " + " ".join(f"{n:9.0f}" for n in [*sums, sum(sums)])]
        for what in ("load", "store", "reduction"):
            if kernel[f"{what}s"]:
                count, size = kernel[f"{what}s"] * scale, kernel[f"{what}_bytes"] * scale
                lines += [f"  asynchronous {what}s: {count:.1f}, {size:.0f} bytes"]
        slots = issue_slots(kernel, tiles)
        lines += ["  issue slots of a sub-partition: " + " ".join(f"{s:.0f}" for s in slots)]
        if kernel["multiplications"]:
            cycles = kernel["multiply_cycles"] * scale
            lines += [f"  multiplications: {kernel['multiplications'] * scale:.1f}, {cycles:.0f} tensor-core cycles"]
    return "\n".join(lines)
