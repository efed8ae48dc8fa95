"""The contenders of gpu.py: what each runs, and which outputs of it are checked.

ours  the operator dglu or dsrelu: one call, outputs newly allocated
      ours-kept: block-scaled A, and weights that were dequantised beforehand; ours-without-dbias; ours-deterministic
E0    torch grouped_mm alone, on BF16 operands (E0x: operands dequantised beforehand): a GEMM without the epilogue
E1    grouped_mm and a compiled epilogue with dprob (E1b: and dbias).
      E1x: compiled dequantisers in front; where D is MXFP8, compiled quantisers with packed scales in the epilogue
E3    the fused Triton kernel of gpu_triton.py, the best of its configurations (E3x: compiled dequantisers in front)
E6    quack's gemm_dgated, the best of its configurations; it also writes the recomputed activation (E6b: and compiled dbias)
"""

import functools
import sys
from typing import NamedTuple

import timing
import torch
import torch.nn.functional as F
from gpu_problem import DEQUANTISE, epilogue, quantise

import cudnn_grouped
from cudnn_grouped.scales import physical_scales

CONTENDERS = ("E0", "E1", "ours", "ours-kept", "E3", "E6")


class Contender(NamedTuple):
    """run: of the number of an input set. outputs: what a result holds, by the names of ``Reference.errors``."""

    run: object
    outputs: object
    note: str = ""


class NotRun(Exception):
    """Why a contender has no part in a problem."""


def build(name, problem, reference, options):
    """The Contender; NotRun where there is none."""
    makers = {"E0": grouped_mm, "E1": unfused, "E3": triton_fused, "E6": quack}
    makers |= {"ours": ours, "ours-kept": ours_kept}
    makers |= {"ours-deterministic": ours_deterministic, "ours-without-dbias": ours_without_dbias}
    return makers[name](problem, reference, options)


def label(name, problem):
    """E1 -> E1x or E1b: block-scaled operands, dbias."""
    if not name.startswith("E"):
        return name
    return name + "x" * (problem.format.block is not None) + "b" * (problem.dbias and name != "E0")


def compiled(function, problem):
    return torch.compile(function, dynamic=False, fullgraph=True) if problem.device == "cuda" else function


def ours_deterministic(problem, reference, options):
    return ours(problem, reference, options, deterministic=True)


def ours_without_dbias(problem, reference, options):
    return ours(problem, reference, options, dbias=False)


def ours_kept(problem, reference, options):
    if problem.format.block is None:
        raise NotRun("BF16 weights need no dequantising")
    return ours(problem, reference, options, kept=True)


def ours(problem, reference, options, **changes):
    calls = [operator(problem, i, **changes) for i in range(len(problem.sets))]

    def outputs(result):
        d_row, d_col, dprob, dbias, _, sf_row, sf_col = result
        named = {"dprob": dprob} | ({"dbias": dbias} if dbias.numel() else {})
        if not problem.format.quantised:
            return named | {"d": d_row}
        sf_row, sf_col = (physical_scales(scales)[0].view(torch.uint8) for scales in (sf_row, sf_col))
        return named | {"d_row": d_row, "d_col": d_col, "sf_row": sf_row, "sf_col": sf_col}

    return Contender(lambda i: calls[i](), outputs)


def operator(problem, i, deterministic=False, kept=False, dbias=None):
    """The operator bound to input set i. kept: with dequantised weights. dbias: None is as the problem has it."""
    suite, inputs = problem.suite, problem.sets[i]
    ones = torch.ones(len(suite.counts), device=problem.device)
    tensors = {
        "a": inputs.a,
        "b": [inputs.b.permute(1, 2, 0)],
        "c": inputs.c,
        "padded_offsets": problem.ends,
        "alpha": ones,
        "prob": inputs.prob,
    }
    if problem.format.block is not None:
        tensors |= {"sfa": problem.scales(inputs.sfa[None]), "sfb": [problem.scales(inputs.sfb)]}
    if kept:
        (b,), (sfb,) = tensors["b"], tensors.pop("sfb")
        tensors["b"] = [cudnn_grouped.dequantize_weights(b, sfb, problem.format.block)]
    options = {
        "generate_dbias": problem.dbias if dbias is None else dbias,
        "deterministic": deterministic,
        "sf_vec_size": problem.format.sf_vec_size,
    }
    if problem.format.quantised:
        options |= {"d_dtype": torch.float8_e4m3fn, "norm_const": torch.ones(1, device=problem.device)}
    if suite.activation == "dsrelu":
        return functools.partial(torch.ops.cudnn_grouped.dsrelu, **tensors, **options, c_role="preactivation")
    options |= {"beta": ones, "act_func": suite.activation, **suite.parameters}
    return functools.partial(torch.ops.cudnn_grouped.dglu, **tensors, **options)


def grouped_mm(problem, reference, options):
    calls = [functools.partial(_multiply, s.a_bf16, s.b_bf16, problem.ends) for s in problem.sets]
    return Contender(lambda i: calls[i](), lambda r: {"r": r})


def _multiply(a, b, ends):
    return F.grouped_mm(a, b.transpose(1, 2), offs=ends)


def column_sums(problem):
    """D -> dbias: blocks of 256 rows, then the blocks of each expert."""
    first = torch.arange(0, problem.suite.m, 256, device=problem.device)
    expert = (problem.ends[None] <= first[:, None]).sum(1)
    experts = torch.arange(len(problem.suite.counts), device=problem.device)
    of_expert = (experts[:, None] == expert[None]).float()
    return lambda d: (of_expert @ d.view(-1, 256, d.shape[1]).float().sum(1)).bfloat16()


def unfused(problem, reference, options):
    backward, sums, quantised = epilogue(problem.suite), column_sums(problem), problem.format.quantised

    def finish(r, c, prob):
        d, dprob = backward(r, c, prob)
        if not quantised:
            return dprob, d.bfloat16()
        return (dprob, *quantise(d), sums(d)) if problem.dbias else (dprob, *quantise(d))

    finish = compiled(finish, problem)
    dbias = compiled(sums, problem)  # of D in BF16, alone: faster than in the epilogue
    operands = _operands(problem)

    def run(i):
        result = finish(_multiply(*operands(i), problem.ends), problem.sets[i].c, problem.sets[i].prob)
        return (*result, dbias(result[1])) if problem.dbias and not quantised else result

    names = ("dprob", "d_row", "sf_row", "d_col", "sf_col") if quantised else ("dprob", "d")
    return Contender(run, lambda result: dict(zip((*names, "dbias"), result)))


def _operands(problem):
    """i -> A, B in BF16: as they are, or by compiled dequantisers."""
    if problem.format.block is None:
        return lambda i: (problem.sets[i].a_bf16, problem.sets[i].b_bf16)
    dequantise = compiled(DEQUANTISE[problem.format.block], problem)
    sets = problem.sets
    return lambda i: (dequantise(sets[i].a, sets[i].sfa), dequantise(sets[i].b, sets[i].sfb))


def triton_fused(problem, reference, options):
    if problem.device == "cpu":
        raise NotRun("needs a GPU")
    try:
        from gpu_triton import CONFIGS, Fused
    except ImportError as error:
        raise NotRun(str(error)) from error

    def maker(config):
        fused = Fused(problem, config)
        return Contender(
            lambda i: fused.run(
                problem.sets[i].a_bf16, problem.sets[i].b_bf16, problem.sets[i].c, problem.sets[i].prob
            ),
            dict,
            str(config),
        ), fused

    best, fused = pick([functools.partial(maker, config) for config in CONFIGS[: options.tune]], problem, reference)
    if problem.format.block is None:
        return best
    operands = _operands(problem)
    return best._replace(run=lambda i: fused.run(*operands(i), problem.sets[i].c, problem.sets[i].prob))


def pick(makers, problem, reference):
    """The fastest of (Contender, anything) makers, of those that run and are right."""
    found, dropped = [], []
    for maker in makers:
        try:
            candidate = maker()
            contender = candidate[0]
            errors, good = reference.errors(contender.outputs(contender.run(0)))
            if good:
                found.append((timing.quick(contender.run, problem.device), candidate))
            else:
                dropped.append(f"{contender.note} is wrong: {errors}")
        except Exception as error:  # a configuration that the compiler refuses is no news
            timing.synchronise(problem.device)  # unless the device is lost: this raises again
            dropped.append(f"{type(error).__name__}: {str(error).splitlines()[:1]}")
    if not found:
        raise RuntimeError(f"no configuration works: {'; '.join(dropped[:3])}")
    _, best = min(found, key=lambda pair: pair[0])
    contender = best[0]._replace(note=f"{best[0].note}, best of {len(found)}, {len(dropped)} dropped")
    return contender, *best[1:]


def quack(problem, reference, options):
    """D lies with gate and up alternating by single columns, and so does its C, permuted beforehand."""
    suite = problem.suite
    standard = suite.activation == "dgeglu" and suite.parameters["geglu_alpha"] == 1.702
    activation = "swiglu" if suite.activation == "dswiglu" else "swiglu_oai" if standard else None
    if not options.quack:
        raise NotRun("no --quack")
    if activation is None or problem.format.block is not None:
        raise NotRun("quack has no such activation with dprob" if activation is None else "BF16 only")
    _import_quack(options.quack)
    from quack import gemm_interface

    def alternating(c):
        return c.view(suite.m, suite.n // 32, 2, 32).transpose(2, 3).reshape(c.shape).contiguous()

    saved = [alternating(s.c) for s in problem.sets]
    starts = F.pad(problem.ends, (1, 0))
    d = torch.empty_like(saved[0])
    recomputed = torch.empty(suite.m, suite.n, dtype=torch.bfloat16, device=problem.device)
    tuned = gemm_interface.gemm_dgated_tuned
    dbias = compiled(column_sums(problem), problem)

    def maker(config, dynamic):
        def run(i):
            s = problem.sets[i]
            b = s.b_bf16.transpose(1, 2)
            dprob = tuned.fn(
                s.a_bf16, b, saved[i], d, recomputed, s.prob, activation, True, starts, None, dynamic, config=config
            )
            return (dprob, d, dbias(d)) if problem.dbias else (dprob, d)

        note = f"{config.tile_m}x{config.tile_n}{'pp' if config.pingpong else ''}{'d' if dynamic else 's'}"
        return (Contender(run, outputs, note),)

    def blocked(x):
        return x.view(-1, suite.n // 32, 32, 2).transpose(2, 3).reshape(x.shape)

    def outputs(result):
        named = {"dprob": result[0], "d": blocked(result[1])}
        return named | ({"dbias": blocked(result[2])} if problem.dbias else {})

    configs = [candidate.kwargs["config"] for candidate in tuned.configs]
    configs = [c for c in configs if c.device_capacity == 9 and not c.swap_ab and c.pingpong and c.tile_n >= 128]
    makers = [functools.partial(maker, config, True) for config in configs]
    default = gemm_interface.default_config(torch.device(problem.device))
    makers += [functools.partial(maker, default, dynamic) for dynamic in (True, False)]
    return pick(makers, problem, reference)[0]


def _import_quack(folder):
    for path in (folder, folder / "nvidia_cutlass_dsl" / "python_packages"):
        if str(path) not in sys.path:
            sys.path.insert(0, str(path))
    try:
        from quack import gemm_dact
    except ImportError as error:
        raise NotRun(f"quack does not import: {error}") from error
    try:
        gemm_dact.get_max_active_clusters(2)
    except Exception:  # the driver query of some DSL versions fails; the answer is the same
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        gemm_dact.get_max_active_clusters = lambda size: processors // size
