"""What gpu.py prints and plots of its rows."""

# Upper limits of ours / E0 of BF16 operands in the steady state; the MXFP8 ones include the dequantisers.
BARS = {
    "bf16": {
        "h1": 1.00,
        "dsv3": 1.00,
        "qwen235": 1.00,
        "k3": 1.00,
        "gptoss": 1.00,
        "qwen30": 1.03,
        "small": 1.03,
        "ultra": 1.03,
        "super": 1.05,
    },
    "mxfp8": {
        "h1": 1.12,
        "dsv3": 1.12,
        "qwen235": 1.15,
        "k3": 1.15,
        "gptoss": 1.20,
        "qwen30": 1.38,
        "small": 1.38,
        "ultra": 1.38,
        "super": 1.40,
    },
}
E3_BAR, E1_BAR, NVFP4_BAR = 1.25, 1.5, 1.10  # MXFP8: E3x / ours, E1x / ours at least; NVFP4 / MXFP8, D in BF16, at most
# Contenders of the sections that compare an option's two values.
ON_AND_OFF = {"dbias": ("ours", "ours-without-dbias"), "deterministic": ("ours-deterministic", "ours")}
COLOURS = {
    "E0": "#9aa0a6",
    "E1": "#e8a33d",
    "ours": "#1f6fb4",
    "ours-kept": "#7fb3dd",
    "E3": "#5aa469",
    "E6": "#b05fa8",
}


def base(contender):
    """E1xb -> E1"""
    return contender.rstrip("xb") if contender.startswith("E") else contender


def times(row, which="steady_ms"):
    """{E0, E1, ...: ms} of a row."""
    return {base(name): result[which] for name, result in row["contenders"].items() if which in result}


def merge(reports):
    """The last report with the rows of all; a later row replaces an earlier one."""
    rows, host, energy = {}, {}, {}
    for report in reports:
        rows |= {(r["section"], r["name"], r["format"], r["dbias"]): r for r in report["rows"]}
        host |= report["host_us"]
        energy |= report.get("energy", {})
    each = {key: ", ".join(sorted({str(report[key]) for report in reports})) for key in ("date", "seconds")}
    return {**reports[-1], **each, "rows": list(rows.values()), "host_us": host, "energy": energy}


def print_row(row):
    yardstick = times(row).get("E0") or next(iter(times(row).values()), None)
    for name, result in row["contenders"].items():
        ms = result["steady_ms"]
        clock = f"{result['clock_mhz']:.0f} MHz {result['watt']:.0f} W" if "clock_mhz" in result else ""
        low, high = result["quartiles_ms"]
        print(
            f"    {name:18} steady {ms:8.4f} ms {row['flop'] / ms / 1e9:6.0f} TF {ms / yardstick:6.3f}x {clock:14}"
            f" interleaved {result['interleaved_ms']:8.4f} ms [{low:.4f} {high:.4f}]"
            f"  error {max(result['errors'].values()):.1e}"
        )
    print(f"    row took {row['wall_s']:.0f} s", flush=True)


def print_bars(rows):
    print("\nsteady state against the bars")
    suites = [row for row in rows if row["section"] == "suites"]
    by_key = {(row["name"], row["format"], row["dbias"]): times(row) for row in suites}
    for (name, format, dbias), ms in by_key.items():
        where = f"{name} {format}{' dbias' if dbias else ''}"
        if "ours" not in ms:
            continue
        e0 = by_key.get((name, "bf16", dbias), {}).get("E0")
        if e0 and name in BARS.get(format, ()):
            _bar(f"{where}: ours / E0 of BF16", ms["ours"] / e0, BARS[format][name])
        if format == "mxfp8":
            for rival, bar in (("E3", E3_BAR), ("E1", E1_BAR)):
                if rival in ms:
                    _bar(f"{where}: {rival}x / ours", ms[rival] / ms["ours"], bar, at_least=True)
        other = by_key.get((name, "mxfp8-bf16", dbias), {})
        if format == "nvfp4" and "ours" in other:
            _bar(f"{where}: NVFP4 / MXFP8, D in BF16", ms["ours"] / other["ours"], NVFP4_BAR)


def _bar(what, ratio, bar, at_least=False):
    met = ratio >= bar if at_least else ratio <= bar
    print(f"  {what:44} {ratio:6.3f}  bar {'>=' if at_least else '<='} {bar:.2f}  {'met' if met else 'MISSED'}")


def print_sections(rows):
    for row in rows:
        where, ms = f"{row['section']}: {row['name']} {row['format']}", times(row)
        if row["section"] == "jagged":
            per_row = ", ".join(f"{name} {value / row['shape']['M'] * 1e6:.2f} ns a row" for name, value in ms.items())
            print(f"{where}: {per_row}")
        on, off = (ms.get(name) for name in ON_AND_OFF.get(row["section"], ("", "")))
        if on and off:
            print(f"{where}: on / off {on / off:.3f} ({on:.4f} ms, {off:.4f} ms)")


def print_energy(report):
    """Joules of a call in the steady state, and what the bytes cost, at a copy's price, that it moves and E0 does not: C,
    what D is larger than E0's result, codes and BF16 of what is dequantised."""
    price = report.get("energy", {}).get("joule_a_byte")
    for row in report["rows"] if price else ():
        used = {
            base(name): result["steady_ms"] * result["watt"]
            for name, result in row["contenders"].items()
            if "watt" in result
        }
        is_suite = row["section"] == "suites" and row["format"] in ("bf16", "mxfp8")
        if not (is_suite and {"E0", "ours"} <= used.keys()):
            continue
        shape = row["shape"]
        result = 2 * shape["M"] * shape["N"]
        width = 1 if shape["activation"] == "dsrelu" else 2
        more = (2 * width - 1) * result
        if row["format"] == "mxfp8":
            more += 3 * (shape["M"] + shape["L"] * shape["N"]) * shape["K"]
        print(
            f"{row['name']} {row['format']}: E0 {used['E0']:.0f} mJ, ours {used['ours']:.0f} mJ, {more / 1e6:.0f} MB more cost"
            f" {more * price * 1e3:.0f} mJ"
        )


def plot(report, folder):
    try:
        import matplotlib
    except ImportError:
        print("no plots: matplotlib is missing")
        return
    matplotlib.use("Agg")
    rows = [row for row in report["rows"] if row["section"] == "suites" and row["contenders"]]
    if not rows:
        return
    folder.mkdir(parents=True, exist_ok=True)
    _bars(
        rows,
        report,
        "TFLOPS (2 M N K / time), steady",
        folder / "gpu_tflops.png",
        lambda row, ms, _: row["flop"] / ms / 1e9,
    )
    with_yardstick = [row for row in rows if "E0" in times(row)]
    if with_yardstick:
        title = "time / time of grouped_mm alone (E0), steady"
        _bars(with_yardstick, report, title, folder / "gpu_ratio.png", lambda row, ms, all_ms: ms / all_ms["E0"])


def _bars(rows, report, title, path, value):
    import matplotlib.pyplot as plt

    formats = list(dict.fromkeys(row["format"] for row in rows))
    figure, axes = plt.subplots(len(formats), 1, figsize=(13, 3.4 * len(formats)), squeeze=False, layout="constrained")
    for axis, format in zip(axes[:, 0], formats):
        chosen = [row for row in rows if row["format"] == format]
        names = [name for name in COLOURS if any(name in times(row) for row in chosen)]
        for i, name in enumerate(names):
            present = [(x, row) for x, row in enumerate(chosen) if name in times(row)]
            at = [x + (i - (len(names) - 1) / 2) * 0.8 / len(names) for x, _ in present]
            heights = [value(row, times(row)[name], times(row)) for _, row in present]
            axis.bar(at, heights, 0.8 / len(names), label=name, color=COLOURS[name])
        ticks = [row["name"] + (" +dbias" if row["dbias"] else "") for row in chosen]
        axis.set_xticks(range(len(chosen)), ticks, rotation=20, ha="right")
        axis.set_title(f"{format}: {title}", fontsize=10)
        axis.grid(axis="y", alpha=0.3)
        axis.legend(fontsize=8, ncols=len(names))
    figure.suptitle(f"{report['device']}, torch {report['torch']}, {report['date']}", fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    print(path)
