// The Python module _C: the validator on metadata, the last error, the engines and the support table.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "../core/engine.h"
#include "../core/last_error.h"
#include "../core/support.h"
#include "named_arguments.h"

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

void read_tensor(py::object const& given, Tensor& into) { into = tensor_from(given); }
void read_tensor(py::object const& given, std::vector<Tensor>& into) {
  if (given.is_none()) return;
  if (!py::isinstance<py::list>(given)) {
    into = {tensor_from(given)};
    return;
  }
  for (py::handle item : given) into.push_back(tensor_from(item));
}

template <class T>
void read_option(py::object const& given, T& into) {
  if constexpr (std::is_same_v<T, DType>) {
    if (!given.is_none()) into = dtype_named(given.cast<std::string>());
  } else {
    into = given.cast<T>();
  }
}

template <class A>
std::optional<Error> verdict(A& a) {
  std::conditional_t<std::is_same_v<A, Arguments>, GroupedGemm,
                     std::conditional_t<std::is_same_v<A, WeightGradientArguments>, WeightGradient, QuantizeProblem>>
      problem;
  return validate(a, problem);
}

py::object check(std::string const& operation, py::dict const& tensors, py::dict const& options, bool read_values) {
  std::optional<AnyArguments> arguments = arguments_of(operation);
  if (!arguments) throw py::value_error(std::string("operation: expected ") + kOperationNames + ", got " + operation);
  return std::visit(
      [&](auto& a) {
        a.values_readable = read_values;
        each_tensor(a, [&](char const* name, auto& into) {
          if (tensors.contains(name)) read_tensor(tensors[name], into);
        });
        each_option(a, [&](char const* name, auto& into) {
          if (options.contains(name)) read_option(options[name], into);
        });
        return as_python(verdict(a));
      },
      *arguments);
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
  m.def(
      "check", &check, py::arg("operation"), py::arg("tensors"), py::arg("options"), py::arg("read_values") = false,
      "Checks arguments by their metadata, and with read_values by the values at their addresses too. Returns None, or "
      "(kind, argument, text).");
  m.def("engines", &engine_list, "The engines of the loaded libraries.");
  m.def("engine_for", &engine_name, py::arg("device_type"), py::arg("capability") = py::none(),
        "The name of the engine that serves a device, or None.");
  m.def("support_table", &support_table, "The rows that the validator accepts.");
  m.def("version", [] { return CUDNN_GROUPED_VERSION; });
  m.def("grid_n", &grid_n, py::arg("n"), py::arg("tile_n"), py::arg("cluster_n"),
        "Slots per row of the documented dprob workspace.");
}
