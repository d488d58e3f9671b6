"""Command line for the build and for people: architectures, list, compile, manifest, report."""

import argparse
import json
import platform
import sys
from pathlib import Path

from . import catalog, fingerprint
from .specs import ARCHITECTURES, Spec, all_specs, spec_from_symbol


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    naming = commands.add_parser("architectures", help="print the GPUs that a build is for, one per line")
    names = f"all, or some of {', '.join(ARCHITECTURES)}"
    naming.add_argument("names", nargs="*", default=[fingerprint.ARCH], metavar="NAME", help=names)

    architecture = argparse.ArgumentParser(add_help=False)
    architecture.add_argument(
        "--arch", choices=ARCHITECTURES, default=fingerprint.ARCH, help="the GPUs to compile for (%(default)s)"
    )

    listing = commands.add_parser("list", parents=[architecture], help="print the symbols that ship, one per line")
    listing.add_argument("symbols", nargs="*", metavar="SYMBOL", help="only those of these that compile for --arch")
    listing.add_argument("--all", action="store_true", help="every symbol that can be compiled for any")

    compiling = commands.add_parser("compile", parents=[architecture], help="compile symbols to object files")
    compiling.add_argument("symbols", nargs="+", metavar="SYMBOL")
    target = compiling.add_mutually_exclusive_group(required=True)
    target.add_argument("-o", "--out", type=Path, help="the object file, for one symbol")
    target.add_argument("-d", "--directory", type=Path, help="folder for SYMBOL.o of each")
    # the compiler makes code for no other processor
    hosts = sorted({platform.machine(), "aarch64"})
    compiling.add_argument(
        "--host", choices=hosts, default=platform.machine(), help="the processor that launches them (%(default)s)"
    )
    compiling.add_argument("--depfile", type=Path, help="write a make rule that names the sources")
    kept = "write SYMBOL.ptx beside each object; a copy with another name is left in CUTE_DSL_DUMP_DIR"
    compiling.add_argument("--keep-ptx", action="store_true", help=kept)

    manifest = commands.add_parser(
        "manifest", parents=[architecture], help="print toolkit, versions and source hash of a library as JSON"
    )
    manifest.add_argument("symbols", nargs="*", metavar="SYMBOL", help="default: every symbol that ships")

    reporting = commands.add_parser(
        "report", parents=[architecture], help="compile and print registers, spills and WGMMA warnings"
    )
    reporting.add_argument(
        "symbols", nargs="*", metavar="SYMBOL", help="or a kernel, for all its symbols; default: all that ship"
    )

    arguments = parser.parse_args(argv)
    if arguments.command == "architectures":
        if unknown := [name for name in arguments.names if name not in (*ARCHITECTURES, "all")]:
            naming.error(f"a GPU's architecture must be {names}, got {' '.join(unknown)}")
        print(*(arch for arch in ARCHITECTURES if {arch, "all"} & set(arguments.names)), sep="\n")
        return 0
    try:
        shipped = catalog.of_architecture(arguments.arch)
        specs = [spec for symbol in arguments.symbols for spec in _specs(symbol, shipped)] or list(shipped)
    except ValueError as error:
        parser.error(str(error))
    if arguments.command == "list":
        listed = all_specs() if arguments.all else [spec for spec in specs if catalog.compiles(spec, arguments.arch)]
        if not listed:
            print(f"none of {' '.join(arguments.symbols)} compiles for {arguments.arch}", file=sys.stderr)
            return 0
        print(*(spec.symbol for spec in listed), sep="\n", flush=True)
        return 0
    if arguments.command == "compile":
        if arguments.out is not None and len(specs) != 1:
            parser.error("--out takes one symbol; use --directory for several")
        from .compile import compile_object

        outputs = [arguments.out or arguments.directory / f"{spec.symbol}.o" for spec in specs]
        for spec, path in zip(specs, outputs):
            compile_object(spec, path, arguments.arch, arguments.host, arguments.keep_ptx)
        if arguments.depfile is not None:
            arguments.depfile.write_text(_rule(outputs))
        return 0
    if arguments.command == "manifest":
        _manifest(specs, arguments.arch)
        return 0
    return _report(specs, arguments.arch)


def _specs(name: str, shipped: tuple[Spec, ...]) -> list[Spec]:
    """The spec of a symbol, or all specs of a kernel that are ``shipped``; ValueError if there is none."""
    of_kernel = [spec for spec in shipped if spec.op == name]
    return [spec for spec in of_kernel if spec.symbol == name] or of_kernel or [spec_from_symbol(name)]


def _rule(outputs: list[Path]) -> str:
    """The make rule of objects from all sources that this process has read."""
    root = Path(__file__).parent
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    sources = sorted(file for file in files if file and root in Path(file).parents)
    return ": ".join(" ".join(str(p).replace(" ", "\\ ") for p in paths) for paths in (outputs, sources)) + "\n"


def _manifest(specs: list[Spec], arch: str) -> None:
    from .compile import runtime_libraries

    content = {
        "arch": arch,
        # the toolkit whose runtime the objects expect: cu12 or cu13
        "toolkit": runtime_libraries()[0].parent.parent.name,
        "versions": fingerprint.versions(),
        "source_hash": fingerprint.source_hash(),
        "symbols": [spec.symbol for spec in specs],
    }
    print(json.dumps(content, indent=1))


def _report(specs: list[Spec], arch: str) -> int:
    from .compile import compile_and_report

    print(f"{'symbol':32} {'registers':>9} {'spill bytes':>11}  kernel")
    for spec in specs:
        for kernel in compile_and_report(spec, arch)[1]:
            print(f"{kernel.symbol:32} {kernel.registers:9} {kernel.spill_bytes:11}  {kernel.kernel[:60]}", flush=True)
            for warning in kernel.wgmma:
                print(f"    {warning}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
