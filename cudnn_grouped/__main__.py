"""``python -m cudnn_grouped info [--json]`` and ``python -m cudnn_grouped demo``."""

import argparse
import json
import sys

import torch

from . import __version__, library


def info():
    """What is built and what it runs on, as plain data."""
    library.load_cuda(without_device=True)
    devices = [{"device": "cpu", "name": "CPU", "capability": None}]
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        devices.append({"device": f"cuda:{index}", "name": torch.cuda.get_device_name(index), "capability": capability})
    for device in devices:
        device["engine"] = library.C.engine_for(device["device"].partition(":")[0], device["capability"])
    return {
        "version": __version__,
        "torch": torch.__version__,
        "cuda_library": library.cuda_status(),
        "jax_library": "built" if library.JAX_LIBRARY.exists() else "not built",
        "architectures": _architectures(),
        "engines": library.C.engines(),
        "devices": devices,
    }


def _architectures():
    """{folder of csrc: architectures that nvcc compiled it for}, empty without the CUDA library."""
    try:
        from ._build_config import CUDA_ARCHS
    except ImportError:
        return {}
    return CUDA_ARCHS if library.CUDA_LIBRARY.exists() else {}


def print_info(report):
    print(f"cudnn_grouped {report['version']}, torch {report['torch']}")
    print(f"CUDA engines' library: {report['cuda_library']}")
    for folder, architectures in report["architectures"].items():
        print(f"  {folder:8} compiled for {', '.join(architectures)}")
    print(f"JAX handlers' library: {report['jax_library']}")
    print("engines built:")
    for engine in report["engines"]:
        served = ", ".join(f"{major}.{minor}" for major, minor in engine["capabilities"])
        print(f"  {engine['name']:8} {f'CUDA, compute capability {served}' if served else engine['device']}")
    print("devices:")
    for device in report["devices"]:
        capability = "" if device["capability"] is None else " (compute capability {}.{})".format(*device["capability"])
        print(f"  {device['device']:8} {device['engine'] or 'no engine':10} {device['name']}{capability}")


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m cudnn_grouped", description="About this installation.")
    commands = parser.add_subparsers(dest="command", required=True)
    about = commands.add_parser("info", help="version, engines built, devices and the engine that serves each")
    about.add_argument("--json", action="store_true", help="print JSON")
    demo = commands.add_parser("demo", help="the fused backward of an MoE layer on real text, checked against autograd")
    demo.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(arguments)
    if given.command == "demo":
        from .demo import run

        return run(as_json=given.json)
    report = info()
    if given.json:
        print(json.dumps(report, indent=2))
    else:
        print_info(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
