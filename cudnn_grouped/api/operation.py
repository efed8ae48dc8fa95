"""One wrapper call and the class life cycle, shared by all documented operations.

Both end in an operator of ``torch.ops.cudnn_grouped`` and so in the one validator and dispatcher; errors come back with
the layer's own argument names.
"""

import sys

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .. import library
from ..errors import meta_mixture, raise_verdict, translated_errors
from .arguments import (
    as_list,
    call_name,
    check_call,
    check_constants,
    check_options,
    check_tensors,
    check_weights,
    sample_name,
)
from .stream import launch_stream
from .tuple_dict import TupleDict

# What the operators do when they are not told: torch takes its time over each argument that a call spells out.
_DEFAULTS = {
    name: {a.name: a.default_value for a in getattr(torch.ops.cudnn_grouped, name).default._schema.arguments}
    for form in ("{}", "{}_out")
    for name in map(form.format, ("dsrelu", "dglu", "srelu", "glu", "mm"))
}

OUTPUTS = ("d_row", "d_col", "dprob", "dbias", "amax", "sfd_row", "sfd_col")


def resolve_deterministic(deterministic):
    """None follows ``torch.use_deterministic_algorithms``."""
    return torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic


def run_wrapper(operator, tensors, required, options, constants, dprob, current_stream):
    """Check the wrapper's arguments, run the functional operator and return the documented TupleDict.

    tensors, options: by the operator's argument names, None where not given. dprob: the caller's accumulator or None.
    """
    if not torch.compiler.is_compiling() and _has_jax_arrays(tensors):
        from ..jax.entry_points import run_wrapper as run_on_jax

        return run_on_jax(operator, tensors, required, options, constants, dprob, current_stream)
    check_call({**tensors, "dprob": dprob}, required, options, constants)
    options = {**options, "deterministic": resolve_deterministic(options["deterministic"])}
    with launch_stream(current_stream, tensors["a"].device) as record, translated_errors(call_name):
        if dprob is not None and not torch.compiler.is_compiling():
            _check_dprob(operator, tensors, options, dprob)
        result = dict(zip(OUTPUTS, _call(operator, tensors, options), strict=True))
        for name, output in result.items():
            if output.dim() == 1 and name != "dprob":  # shape (0,): absent
                result[name] = None
        if dprob is not None:
            end = dprob.shape[0] if options.get("use_single_group_runtime_offsets") else tensors["padded_offsets"][-1]
            result["dprob"] = _accumulate(dprob, result["dprob"], end)
        if result["d_col"] is None and tensors["a"].dtype != torch.bfloat16:
            result["d_col"] = result["d_row"]
        record(_flat({**tensors, "dprob": dprob}), _flat(result))
    return TupleDict({f"{name}_tensor": output for name, output in result.items()})


def _has_jax_arrays(tensors):
    """Only a program that has imported JAX can have made one."""
    array = getattr(sys.modules.get("jax"), "Array", None)
    return array is not None and any(isinstance(one, array) for value in tensors.values() for one in as_list(value))


def _accumulate(dprob, new, end):
    """dprob += new; rows from ``end`` on belong to no expert and are zero."""
    rows = torch.arange(dprob.shape[0], device=dprob.device)
    dprob.add_(new.view(dprob.shape)).view(-1).masked_fill_(rows >= end, 0.0)
    return dprob


def _call(operator, tensors, options):
    if mixture := meta_mixture(tensors):
        raise_verdict(("value", *mixture), call_name)
    arguments = {name: value for name, value in tensors.items() if value is not None}
    arguments["b"] = as_list(tensors["b"])
    if tensors["sfb"] is not None:
        arguments["sfb"] = as_list(tensors["sfb"])
    defaults = _DEFAULTS[operator]
    for name, value in options.items():
        default = defaults[name]
        if type(value) is not type(default) or value != default:
            arguments[name] = value
    return getattr(torch.ops.cudnn_grouped, operator).default(**arguments)


def _flat(tensors):
    for value in tensors.values():
        if value is not None:
            yield from as_list(value)


def _check_dprob(operator, tensors, options, dprob):
    """The functional operator has no dprob argument: let the validator see it as the destination form's, before any work."""
    c = tensors["c"]
    # A float32 d_row goes with every operand format and has the weakest size rules.
    d_row = _description(torch.empty(c.shape, dtype=torch.float32, device="meta"), c.device)
    options = {name: value for name, value in options.items() if name not in ("d_dtype", "generate_dbias")}
    verdict = _verdict(f"{operator}_out", {**_descriptions({**tensors, "dprob": dprob}), "d_row": d_row}, options)
    if verdict is not None and verdict[1] == "dprob":  # anything else the operator reports itself
        raise_verdict(verdict, call_name)


def _verdict(operator, descriptions, options):
    plain = {name: _dtype_name(value) if isinstance(value, torch.dtype) else value for name, value in options.items()}
    return library.C.check(operator, descriptions, plain)


def _descriptions(tensors, device=None):
    """What ``_C.check`` takes for each given tensor; meta tensors count as being on ``device``."""
    descriptions = {}
    for name, value in tensors.items():
        if value is not None:
            described = [_description(one, device) for one in as_list(value)]
            descriptions[name] = described if name in ("b", "sfb") else described[0]
    return descriptions


def _description(tensor, device=None):
    device = device if tensor.is_meta and device is not None else tensor.device
    index = -1 if device.index is None else device.index
    address = 0 if tensor.is_meta or isinstance(tensor, FakeTensor) else tensor.data_ptr()
    return (_dtype_name(tensor.dtype), device.type, index, tuple(tensor.shape), tuple(tensor.stride()), address)


def _dtype_name(dtype):
    return str(dtype).removeprefix("torch.")


def _pointer_table(experts, device):
    index = -1 if device.index is None else device.index
    return ("int64", device.type, index, (experts,), (1,), 0)


class GroupedGemmOperation:
    """The life cycle: construct, ``check_support()``, ``compile()``, ``execute()``; calling it compiles on first use.

    The constructor stores its arguments and settles the weight mode (ValueError for both or neither).
    Nothing is compiled at run time: ``compile()`` fixes dtypes, layouts, N, K, the expert count and which optional
    tensors exist; the number of rows may change from call to call.
    """

    operator = None
    required = ()
    outputs = ("d_row", "dprob")  # those that must be given
    fixed_sizes = (("a", "K", 1), ("c", "columns", 1), ("padded_offsets", "experts", 0))

    def __init__(self, samples, options, constants, *, num_experts, b_shape, b_dtype):
        discrete = {"num_experts": num_experts, "b_shape": b_shape, "b_dtype": b_dtype}
        self._dense = check_weights(samples, discrete, sample_name)
        self._samples, self._options, self._constants = samples, options, constants
        self._num_experts, self._b_shape, self._b_dtype = num_experts, b_shape, b_dtype
        self._resolved = None
        self._compiled = None

    def check_support(self):
        """True if the samples and options are supported; looks at metadata only.

        Raises ValueError for a bad argument, NotImplementedError for a combination that is documented but unavailable,
        RuntimeError where no built engine serves the samples' device. The text starts with the argument's name.
        """
        if self._compiled is not None:
            return True
        check_constants(self._constants)
        check_options(self._options)
        check_options({"num_experts": self._num_experts, "b_shape": self._b_shape, "b_dtype": self._b_dtype})
        check_tensors(self._samples, (*self.required, *self.outputs), sample_name)
        self._check_samples()
        options = self._resolve(self._options)
        device = self._device()
        descriptions = _descriptions(self._operands(self._samples, sample_name), device)
        if not self._dense:
            options = {**options, **self._discrete_options()}
            descriptions["b_ptrs"] = _pointer_table(self._num_experts, device)
            if self._samples["a"].dtype != torch.bfloat16:
                descriptions["sfb_ptrs"] = _pointer_table(self._num_experts, device)
        raise_verdict(_verdict(f"{self.operator}_out", descriptions, options), sample_name)
        _check_engine(device)
        self._resolved = options
        return True

    def compile(self):
        """Fix what the samples say; runs ``check_support()`` if that has not been done. Calling it again does nothing."""
        if self._compiled is None:
            if self._resolved is None:
                self.check_support()
            self._compiled = self._facts(self._samples)
            # From here on only which samples there were matters: the operation must not keep their memory alive.
            self._samples = {argument: sample is not None for argument, sample in self._samples.items()}

    def __call__(self, *args, **kwargs):
        """``compile()`` on first use, then ``execute(...)``."""
        self.compile()
        return self.execute(*args, **kwargs)

    def _execute(self, tensors, current_stream, options=None):
        if self._compiled is None:
            raise RuntimeError("execute: expected compile() before it, got an operation that is not compiled")
        check_tensors(tensors, self.required, call_name)
        self._check_presence(tensors)
        self._check_facts(tensors)
        with launch_stream(current_stream, tensors["a"].device) as record, translated_errors(call_name):
            _call(f"{self.operator}_out", self._operands(tensors, call_name), {**self._resolved, **(options or {})})
            record(_flat(tensors), ())

    def _check_samples(self):
        """Rules of one class on its samples beyond the validator's."""

    def _resolve(self, options):
        return {**options, "deterministic": resolve_deterministic(options["deterministic"])}

    def _operands(self, tensors, name_of):
        """The tensors as the operator takes them."""
        return tensors

    def _device(self):
        for sample in _flat(self._samples):
            if not sample.is_meta:
                return sample.device
        return torch.device("cpu")

    def _discrete_options(self):
        """n and b_dtype from the constructor; also checks the K of b_shape, which no operator takes."""
        a = self._samples["a"]
        n, k = self._b_shape
        visible = a.shape[1] if a.dim() > 1 else None
        packed = a.dtype in (torch.float4_e2m1fn_x2, torch.uint8)
        legal = (visible, 2 * visible) if packed and visible is not None else (visible,)
        if k not in legal:
            expected = " or ".join(str(size) for size in legal)
            raise ValueError(f"b_shape: expected (n, k) with sample_a's k = {expected}, got {tuple(self._b_shape)}")
        return {"n": n, "b_dtype": self._b_dtype}

    def _check_presence(self, tensors):
        for argument, compiled in self._samples.items():
            given, name = tensors[argument] is not None, call_name(argument)
            if argument in ("b", "sfb"):
                continue
            if given and not compiled:
                raise ValueError(f"{name}: expected None (compiled without {sample_name(argument)}), got a tensor")
            if compiled and not given:
                raise ValueError(f"{name}: expected a tensor (compiled with {sample_name(argument)}), got None")
        dense, discrete = ("b", "sfb"), ("b_ptrs", "sfb_ptrs")
        mode, present, absent = ("dense", dense, discrete) if self._dense else ("discrete", discrete, dense)
        if tensors[present[0]] is None:
            raise ValueError(f"{call_name(present[0])}: expected a value (compiled for {mode} weights), got None")
        for argument in absent:
            if tensors[argument] is not None:
                raise ValueError(f"{call_name(argument)}: expected None (compiled for {mode} weights), got a value")

    def _facts(self, tensors):
        """What compilation fixes, as {argument: {fact: value}}."""
        facts = {}
        for argument, value in tensors.items():
            if value is not None and argument not in ("b_ptrs", "sfb_ptrs"):
                first = as_list(value)[0] if as_list(value) else None
                facts[argument] = {"dtype": getattr(first, "dtype", None)}
        for argument, fact, axis in self.fixed_sizes:
            shape = tensors[argument].shape
            facts[argument][fact] = shape[axis] if len(shape) > axis else None
        if tensors["b"] is not None:
            weights = as_list(tensors["b"])
            facts["b"]["form"] = "one per expert" if isinstance(tensors["b"], (list, tuple)) else "one tensor"
            facts["b"]["shape"] = tuple(weights[0].shape) if weights else None
            facts["b"]["layout"] = "k-major" if weights and weights[0].stride()[1:2] == (1,) else "n-major"
        return facts

    def _check_facts(self, tensors):
        for argument, facts in self._facts(tensors).items():
            for fact, value in facts.items():
                compiled = self._compiled[argument][fact]
                if value != compiled:
                    raise ValueError(f"{call_name(argument)}: expected {fact} {compiled} as compiled, got {value}")


def _check_engine(device):
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if library.C.engine_for(device.type, capability) is None:
        built = ", ".join(engine["name"] for engine in library.C.engines())
        got = device if capability is None else f"{device} with compute capability {capability[0]}.{capability[1]}"
        raise RuntimeError(f"device: expected one that a built engine serves ({built}), got {got}")
