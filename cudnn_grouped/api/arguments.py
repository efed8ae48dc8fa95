"""What the wrappers and classes check before the operator: presence, Python types, the weight mode and the constants.

Everything about sizes, dtypes, layouts and combinations is the validator's (csrc/core/validate.cc), which both layers
call; only what never reaches an operator is checked here.
"""

import numbers

import torch

_TENSORS = (
    *("a", "b", "c", "sfa", "sfb", "alpha", "beta", "prob", "bias", "norm_const"),
    *("d", "d_row", "d_col", "dprob", "dbias", "amax", "sfd_row", "sfd_col", "dprob_workspace", "dbias_workspace"),
)

# Parameters of the documents that have one legal value: None stands for it where the default is None.
_CONSTANTS = {"acc_dtype": (torch.float32, None), "cd_major": ("n",), "m_aligned": (256,)}


def _is_int(value):
    if isinstance(value, int):
        return not isinstance(value, bool) and -(2**63) <= value < 2**63
    return isinstance(value, torch.SymInt)


def _is_number(value):
    try:
        return isinstance(value, numbers.Real) and not isinstance(value, bool) and isinstance(float(value), float)
    except OverflowError:
        return False


_TYPES = {
    "an int": _is_int,
    "a number": _is_number,
    "a bool": lambda value: isinstance(value, bool),
    "a str": lambda value: isinstance(value, str),
    "a torch.dtype": lambda value: isinstance(value, torch.dtype),
    "a pair of ints": lambda value: isinstance(value, (tuple, list)) and len(value) == 2 and all(map(_is_int, value)),
}
# A value of exactly this type is one: most options are settled by it.
_EXACT = {"a number": float, "a bool": bool, "a str": str, "a torch.dtype": torch.dtype}
OPTION_TYPES = {
    **dict.fromkeys(("sf_vec_size", "n", "num_experts"), "an int"),
    **dict.fromkeys(("linear_offset", "geglu_alpha", "glu_clamp_max", "glu_clamp_min", "situ_beta1"), "a number"),
    **dict.fromkeys(("situ_beta2", "tanh_clamp_scale"), "a number"),
    **dict.fromkeys(("generate_dbias", "discrete_col_sfd", "deterministic", "vector_f32"), "a bool"),
    **dict.fromkeys(("use_dynamic_sched", "use_single_group_runtime_offsets"), "a bool"),
    **dict.fromkeys(("generate_c", "generate_d", "generate_amax", "accumulate_on_output"), "a bool"),
    "c_per_expert": "a bool",
    "axis": "a str",
    **dict.fromkeys(("dtype", "sf_dtype"), "a torch.dtype"),
    **dict.fromkeys(("b_major", "c_role", "act_func", "clamp_grad", "epilogue_op"), "a str"),
    **dict.fromkeys(("output_mode", "input_order"), "a str"),
    **dict.fromkeys(("b_dtype", "c_dtype", "d_dtype", "wgrad_dtype"), "a torch.dtype"),
    **dict.fromkeys(("mma_tiler_mn", "cluster_shape_mn", "b_shape"), "a pair of ints"),
}
_OPTIONAL = {
    *("n", "num_experts", "b_dtype", "c_dtype", "d_dtype", "dtype", "wgrad_dtype", "b_shape", "cluster_shape_mn"),
    *("tanh_clamp_scale", "linear_offset", "clamp_grad", "epilogue_op", "deterministic"),
}


def call_name(argument):
    """The operator's argument name as the wrapper and ``execute`` spell it."""
    return f"{argument}_tensor" if argument in _TENSORS else argument


def sample_name(argument):
    """The operator's argument name as the class constructor spells it."""
    if argument in _TENSORS or argument == "padded_offsets":
        return f"sample_{argument}"
    return {"b_ptrs": "num_experts", "n": "b_shape"}.get(argument, argument)


def check_constants(constants):
    """ValueError unless each parameter that has one legal value has it."""
    for name, value in constants.items():
        legal = _CONSTANTS[name]
        if value is legal[0]:
            continue
        if not any(value is one or (type(value) is type(one) and value == one) for one in legal):
            raise ValueError(f"{name}: expected {legal[0]!r}, got {value!r}")


def check_options(options):
    """ValueError unless each option has the Python type of its parameter."""
    for name, value in options.items():
        expected = OPTION_TYPES[name]
        if type(value) is _EXACT.get(expected):
            continue
        if not (value is None and name in _OPTIONAL) and not _TYPES[expected](value):
            either = "None or " if name in _OPTIONAL else ""
            raise ValueError(f"{name}: expected {either}{expected}, got {value!r}")


def check_tensors(tensors, required, name_of):
    """ValueError unless the given tensors are tensors (``b`` and ``sfb``: or lists of them) and the required ones are given."""
    for argument in required:
        if tensors[argument] is None:
            raise ValueError(f"{name_of(argument)}: expected a tensor (required), got None")
    for argument, value in tensors.items():
        if value is None:
            continue
        listed = argument in ("b", "sfb") and isinstance(value, (list, tuple))
        for index, one in enumerate(value if listed else (value,)):
            if isinstance(one, torch.Tensor) and one.layout is torch.strided:
                continue
            name = f"{name_of(argument)}[{index}]" if listed else name_of(argument)
            if not isinstance(one, torch.Tensor):
                raise ValueError(f"{name}: expected a torch.Tensor, got {type(one).__name__}")
            raise ValueError(f"{name}: expected a strided tensor, got {one.layout}")


def check_weights(dense, discrete, name_of):
    """ValueError unless exactly one weight mode is given, whole and without arguments of the other. Returns whether dense.

    dense: ``{"b": ..., "sfb": ...}``. discrete: ``{name: value}``, the first deciding the mode, with ``sfb_ptrs`` optional.
    """
    key, given = next(iter(discrete)), [name for name, value in discrete.items() if value is not None]
    b, sfb = name_of("b"), name_of("sfb")
    if dense["b"] is not None:
        if key in given:
            raise ValueError(f"{b}: expected either {b} (dense) or {key} (discrete), got both")
        if given:
            raise ValueError(f"{given[0]}: expected None with {b}, got {_brief(discrete[given[0]])}")
        return True
    if not given:
        raise ValueError(f"{b}: expected either {b} (dense) or {key} (discrete), got neither")
    if dense["sfb"] is not None:
        raise ValueError(f"{sfb}: expected None without {b}, got {_brief(dense['sfb'])}")
    for name, value in discrete.items():
        if value is None and name != "sfb_ptrs":
            raise ValueError(f"{name}: expected a value (required without {b}), got None")
    return False


def check_call(tensors, required, options, constants):
    """What a wrapper checks itself: the options' types and constants, presence, tensors, the weight mode."""
    check_constants(constants)
    check_options(options)
    check_tensors(tensors, required, call_name)
    discrete = {name: tensors[name] for name in ("b_ptrs", "sfb_ptrs")}
    check_weights(tensors, {**discrete, "n": options["n"], "b_dtype": options["b_dtype"]}, call_name)


def as_list(value):
    """``b`` or ``sfb`` as the operator takes it: a list of one dense tensor, of one per expert, or empty."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _brief(value):
    if hasattr(value, "shape"):
        return "a tensor"
    return "a list" if isinstance(value, (list, tuple)) else repr(value)
