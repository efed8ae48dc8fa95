// The Python module _C: the validator on metadata, the last error, the engines and the support table.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "../core/engine.h"
#include "../core/last_error.h"
#include "../core/support.h"

namespace py = pybind11;

namespace cudnn_grouped::bindings {
namespace {

py::object as_python(std::optional<Error> const& error) {
  if (!error) return py::none();
  char const* kind = error->kind == Error::Kind::value             ? "value"
                     : error->kind == Error::Kind::not_implemented ? "not_implemented"
                                                                   : "runtime";
  return py::make_tuple(kind, error->argument, error->text);
}

// (dtype name, device type, device index, shape, strides, address)
Tensor tensor_from(py::handle description) {
  Tensor tensor;
  if (description.is_none()) return tensor;
  auto const fields = description.cast<py::tuple>();
  tensor.dtype_name = fields[0].cast<std::string>();
  tensor.dtype = dtype_named(tensor.dtype_name);
  auto const type = fields[1].cast<std::string>();
  tensor.device.type = type == "cpu" ? Device::Type::cpu : type == "cuda" ? Device::Type::cuda : Device::Type::other;
  tensor.device.index = fields[2].cast<int>();
  auto const sizes = fields[3].cast<std::vector<int64_t>>(), strides = fields[4].cast<std::vector<int64_t>>();
  tensor.rank = int(sizes.size());
  for (int i = 0; i < tensor.rank && i < Tensor::kMaxRank; ++i) {
    tensor.size[i] = sizes[i];
    tensor.stride[i] = strides[i];
  }
  tensor.data = reinterpret_cast<void*>(fields[5].cast<uintptr_t>());
  return tensor;
}

std::vector<Tensor> tensors_from(py::dict const& tensors, char const* name) {
  std::vector<Tensor> result;
  if (!tensors.contains(name)) return result;
  py::object const entry = tensors[name];
  if (entry.is_none()) return result;
  if (!py::isinstance<py::list>(entry)) return {tensor_from(entry)};
  for (py::handle item : entry) result.push_back(tensor_from(item));
  return result;
}

// "dglu", "dglu_out", ...: an operation, and whether its outputs are given.
Arguments arguments_of(std::string const& operation) {
  Arguments a;
  std::string name = operation;
  if (name.size() > 4 && name.substr(name.size() - 4) == "_out") {
    a.has_outputs = true;
    name.resize(name.size() - 4);
  }
  for (Operation o :
       {Operation::dsrelu, Operation::dglu, Operation::dact, Operation::srelu, Operation::glu, Operation::mm}) {
    if (name != name_of(o)) continue;
    a.operation = o;
    if (o == Operation::glu) a.act_func = "swiglu";  // the operator's default
    return a;
  }
  throw py::value_error("operation: expected dsrelu, dglu, dact, srelu, glu or mm, or one with _out, got " + operation);
}

py::object check(std::string const& operation, py::dict const& tensors, py::dict const& options) {
  Arguments a = arguments_of(operation);
  a.values_readable = false;
  struct Slot {
    char const* name;
    Tensor& tensor;
  };
  for (Slot const& slot : {Slot{"a", a.a},
                           Slot{"c", a.c},
                           Slot{"padded_offsets", a.padded_offsets},
                           Slot{"alpha", a.alpha},
                           Slot{"beta", a.beta},
                           Slot{"prob", a.prob},
                           Slot{"sfa", a.sfa},
                           Slot{"norm_const", a.norm_const},
                           Slot{"b_ptrs", a.b_ptrs},
                           Slot{"sfb_ptrs", a.sfb_ptrs},
                           Slot{"bias", a.bias},
                           Slot{"d", a.d_row},
                           Slot{"d_row", a.d_row},
                           Slot{"d_col", a.d_col},
                           Slot{"dprob", a.dprob},
                           Slot{"dbias", a.dbias},
                           Slot{"amax", a.amax},
                           Slot{"sfd_row", a.sfd_row},
                           Slot{"sfd_col", a.sfd_col},
                           Slot{"dprob_workspace", a.dprob_workspace},
                           Slot{"dbias_workspace", a.dbias_workspace}}) {
    if (tensors.contains(slot.name)) slot.tensor = tensor_from(tensors[slot.name]);
  }
  a.b = tensors_from(tensors, "b");
  a.sfb = tensors_from(tensors, "sfb");
  auto read = [&](char const* name, auto& into) {
    if (!options.contains(name)) return;
    into = options[name].cast<std::remove_reference_t<decltype(into)>>();
  };
  auto read_dtype = [&](char const* name, DType& into) {
    if (options.contains(name) && !options[name].is_none()) into = dtype_named(options[name].cast<std::string>());
  };
  read("n", a.n);
  read_dtype("b_dtype", a.b_dtype);
  read("b_major", a.b_major);
  read_dtype("d_dtype", a.d_dtype);
  read_dtype("c_dtype", a.c_dtype);
  read("generate_dbias", a.generate_dbias);
  read("generate_c", a.generate_c);
  read("sf_vec_size", a.sf_vec_size);
  read("discrete_col_sfd", a.discrete_col_sfd);
  read("deterministic", a.deterministic);
  read("mma_tiler_mn", a.mma_tiler_mn);
  read("cluster_shape_mn", a.cluster_shape_mn);
  read("vector_f32", a.vector_f32);
  read("use_dynamic_sched", a.use_dynamic_sched);
  read("c_role", a.c_role);
  read("tanh_clamp_scale", a.tanh_clamp_scale);
  read("act_func", a.act_func);
  read("linear_offset", a.linear_offset);
  read("geglu_alpha", a.geglu_alpha);
  read("glu_clamp_max", a.glu_clamp_max);
  read("glu_clamp_min", a.glu_clamp_min);
  read("clamp_grad", a.clamp_grad);
  read("situ_beta1", a.situ_beta1);
  read("situ_beta2", a.situ_beta2);
  read("epilogue_op", a.epilogue_op);
  read("use_single_group_runtime_offsets", a.use_single_group_runtime_offsets);
  GroupedGemm problem;
  return as_python(validate(a, problem));
}

std::vector<std::string> names_of(std::vector<DType> const& dtypes) {
  std::vector<std::string> names;
  for (DType dtype : dtypes) names.push_back(name_of(dtype));
  return names;
}

py::list support_table() {
  py::list table;
  for (SupportRow const& row : support_rows()) {
    py::list scales;
    for (auto const& [dtype, size] : row.scales) scales.append(py::make_tuple(name_of(dtype), size));
    py::dict entry;
    entry["operation"] = name_of(row.operation);
    entry["name"] = row.name;
    entry["operands"] = names_of(row.operands);
    entry["scales"] = scales;
    entry["c"] = names_of(row.c);
    entry["d"] = names_of(row.d);
    entry["activations"] = row.activations;
    entry["b_majors"] = row.b_majors;
    entry["dequantised_b"] = names_of(row.dequantised_b);
    entry["tile_n"] = tile_ns(row.operation);
    table.append(entry);
  }
  return table;
}

py::list engine_list() {
  py::list list;
  for (Engine const& engine : engines()) {
    py::list capabilities;
    for (int capability : engine.capabilities) capabilities.append(py::make_tuple(capability / 10, capability % 10));
    py::dict entry;
    entry["name"] = engine.name;
    entry["device"] = engine.device == Device::Type::cpu ? "cpu" : "cuda";
    entry["capabilities"] = capabilities;
    list.append(entry);
  }
  return list;
}

py::object engine_name(std::string const& device_type, std::optional<std::pair<int, int>> capability) {
  Engine const* engine = nullptr;
  if (device_type == "cuda" && capability) {
    engine = engine_for_capability(capability->first * 10 + capability->second);
  } else if (device_type == "cpu") {
    std::string why;
    engine = engine_for(Device{}, why);
  }
  if (!engine) return py::none();
  return py::str(engine->name);
}

}  // namespace
}  // namespace cudnn_grouped::bindings

PYBIND11_MODULE(_C, m) {
  using namespace cudnn_grouped;
  using namespace cudnn_grouped::bindings;
  m.doc() = "The validator on metadata, the last error, the engines and the support table.";
  m.def(
      "take_error", [] { return as_python(take_last_error()); },
      "The last failed check of this thread as (kind, argument, text), or None; cleared by the call.");
  m.def("check", &check, py::arg("operation"), py::arg("tensors"), py::arg("options"),
        "Checks arguments by their metadata. Returns None, or (kind, argument, text).");
  m.def("engines", &engine_list, "The engines of the loaded libraries.");
  m.def("engine_for", &engine_name, py::arg("device_type"), py::arg("capability") = py::none(),
        "The name of the engine that serves a device, or None.");
  m.def("support_table", &support_table, "The rows that the validator accepts.");
  m.def("version", [] { return CUDNN_GROUPED_VERSION; });
  m.def("grid_n", &grid_n, py::arg("n"), py::arg("tile_n"), py::arg("cluster_n"),
        "Slots per row of the documented dprob workspace.");
}
