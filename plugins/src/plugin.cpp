// SPDX-License-Identifier: Apache-2.0
#include "plugin.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <utility>

#include "log.h"

namespace trtllm_replayssm {
namespace {

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::DimsExprs;

constexpr int64_t kWordBytes = 4;  // of the INT32 tensors that hold a plan, a table or slots

int64_t plan_words(int64_t rows) { return replayssm_plan_bytes(static_cast<int32_t>(rows)) / kWordBytes; }

// The rows of a plan tensor. A plan grows by more than its 64-byte unit with each row, so its size tells them.
int64_t rows_of_plan(int64_t words) {
  const int64_t bytes = words * kWordBytes - int64_t{sizeof(replayssm_plan_header)};
  return bytes < 0 ? -1 : bytes / int64_t{sizeof(replayssm_plan_row) + sizeof(int32_t)};
}

std::string type_text(DataType type) {
  static const char* const names[] = {"FP32", "FP16", "INT8",  "INT32", "BOOL", "UINT8",
                                      "FP8",  "BF16", "INT64", "INT4",  "FP4",  "E8M0"};
  const auto index = static_cast<size_t>(type);
  return index < std::size(names) ? names[index] : "type code " + std::to_string(static_cast<int>(type));
}

std::string shape_text(const std::vector<Dim>& dims) {
  std::string text = "[";
  for (const Dim& dim : dims) {
    if (text.size() > 1) text += ", ";
    switch (dim.kind) {
      case Dim::kExactly:
        text += std::to_string(dim.size);
        break;
      case Dim::kAtLeast:
        text += "at least " + std::to_string(dim.size);
        break;
      case Dim::kRows:
        text += "rows";
        break;
      case Dim::kTokens:
        text += "tokens";
        break;
      case Dim::kPlanWords:
        text += "words of a plan of those rows";
        break;
    }
  }
  return text + "]";
}

// The sizes of a tensor whose dimension d is dim(d), -1: not known yet.
template <typename DimAt>
std::string given_shape_text(int32_t rank, const DimAt& dim) {
  if (rank < 0) return "no shape";
  std::string text = "[";
  for (int32_t d = 0; d < rank; ++d) {
    const int64_t size = dim(d);
    text += (d ? ", " : "") + (size < 0 ? std::string("?") : std::to_string(size));
  }
  return text + "]";
}

bool is_float(DataType type) { return type == DataType::kFLOAT || type == DataType::kHALF || type == DataType::kBF16; }

int32_t dtype_code(DataType type) {
  return type == DataType::kFLOAT ? REPLAYSSM_FP32 : type == DataType::kBF16 ? REPLAYSSM_BF16 : REPLAYSSM_FP16;
}

// TensorRT-LLM's builder sets it while it builds; host tensors are placeholders then.
bool is_building() {
  const char* value = std::getenv("IS_BUILDING");
  return value && *value && std::strcmp(value, "0") != 0;
}

// A build without CUDA ops works on host memory, outside of TensorRT: that is how enqueue is tested without a GPU.
replayssm_exec execution(cudaStream_t stream) {
  return {replayssm_has_cuda() ? REPLAYSSM_CUDA : REPLAYSSM_HOST, stream};
}

}  // namespace

void log_refusal(const char* plugin, const char* node, const char* why) noexcept {
  try {
    log_error(std::string(plugin) + " '" + (node ? node : "") + "': " + why);
  } catch (...) {  // out of memory: the failure stands without its text
  }
}

Plugin::Plugin(const char* name, PluginKind kind, const char* node, FieldValues values)
    : node_(node), values_(std::move(values)), settings_(kind, values_), name_(name), kind_(kind) {
  metadata_ = metadata(kind_, values_);
  fields_ = serialized_fields(kind_, values_);
  collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
}

std::vector<Dim> Plugin::tokens_by(Dim columns) const {
  if (of_lengths()) return {kTokens, columns};
  return {kRows, kTokens, columns};
}

void Plugin::add_lengths() {
  if (!of_lengths()) return;
  lengths_input_ = static_cast<int32_t>(inputs_.size());
  inputs_.push_back({"host_request_types", TensorType::kInt32, {kRows}});
  inputs_.push_back({"host_context_lengths", TensorType::kInt32, {kRows}});
}

bool Plugin::brings_prompts(const Call& call, int32_t types_input) const {
  constexpr int32_t kContext = 0, kGeneration = 1;
  const auto* const types = call.input<int32_t>(types_input);
  for (int32_t i = 0; i < call.rows; ++i) {
    if (types[i] != types[0] || (types[i] != kContext && types[i] != kGeneration))
      throw Refusal("host_request_types: expected 0 (context) in all rows or 1 (generation) in all, got " +
                    std::to_string(types[0]) + " in row 0 and " + std::to_string(types[i]) + " in row " +
                    std::to_string(i));
  }
  return call.rows > 0 && types[0] == kContext;
}

Plugin::Batch Plugin::batch(const Call& call) const {
  if (!of_lengths()) {
    return {call.tokens > settings_.config.max_step_tokens, int64_t{call.rows} * call.tokens, call.tokens};
  }
  if (!brings_prompts(call, lengths_input_)) return {false, call.tokens, 1};
  const auto* const lengths = call.input<int32_t>(lengths_input_ + 1);
  return {true, call.tokens, std::max(0, *std::max_element(lengths, lengths + call.rows))};
}

int32_t Plugin::add_memory(const char* name, const char* output_name, std::vector<Dim> shape, bool returned) {
  const auto input = static_cast<int32_t>(inputs_.size());
  if (state_io() == StateIo::kHostPointer) {
    inputs_.push_back({name, TensorType::kInt64, {exactly(1)}});
    return input;
  }
  inputs_.push_back({name, TensorType::kInt32, shape});
  if (returned) {
    returned_input_ = input;
    returned_output_ = static_cast<int32_t>(outputs_.size());
    outputs_.push_back({output_name, TensorType::kInt32, std::move(shape)});
  }
  return input;
}

void Plugin::add_table(bool returned) {
  if (of_lengths()) {
    table_input_ = static_cast<int32_t>(inputs_.size());
    inputs_.push_back({"table", TensorType::kInt32, {exactly(kTableHeadWords)}});
    return;
  }
  const int64_t words = replayssm_table_bytes(values_.num_slots, values_.num_layers) / kWordBytes;
  table_input_ = add_memory("table", "table'", {exactly(words)}, returned);
}

void Plugin::add_state(bool returned) {
  const int64_t words = settings_.layout.slot_stride / kWordBytes;
  state_input_ = add_memory("state", "state'", {exactly(values_.num_slots), exactly(words)}, returned);
}

void* Plugin::address(const Call& call, int32_t input) const {
  const std::string name = inputs_[input].name;
  if (state_io() == StateIo::kHostPointer) {
    void* address = nullptr;
    std::memcpy(&address, call.inputs[input], sizeof(address));
    if (!address) throw Refusal(name + ": expected a device address, got 0");
    return address;
  }
  void* const address = const_cast<void*>(call.inputs[input]);
  if (input == returned_input_ && call.outputs[returned_output_] != address) {
    char given[96];
    std::snprintf(given, sizeof(given), "%p, got %p", address, call.outputs[returned_output_]);
    throw Refusal(std::string(outputs_[returned_output_].name) + ": expected the address of the input " + name + ", " +
                  given);
  }
  return address;
}

replayssm_table Plugin::table(const Call& call) const {
  replayssm_table table;
  void* const memory = of_lengths() ? const_cast<void*>(call.inputs[table_input_]) : address(call, table_input_);
  check(replayssm_table_from_buffer(memory, values_.num_slots, values_.num_layers, &table));
  return table;
}

replayssm_layer Plugin::layer(const Call& call) const {
  replayssm_layer layer;
  check(replayssm_layer_from_blob(&settings_.layout, address(call, state_input_), values_.layer, &layer));
  layer.first_head = values_.first_head;
  return layer;
}

replayssm_tensor Plugin::vector(const Call& call, int32_t input) {
  return {const_cast<void*>(call.inputs[input]), dtype_code(call.in[input].type), {0, 0}};
}

replayssm_tensor Plugin::columns(const Call& call, int32_t input, int64_t offset, int64_t inner) {
  const nvinfer1::PluginTensorDesc& desc = call.in[input];
  auto* const data = static_cast<char*>(const_cast<void*>(call.inputs[input]));
  const int64_t element = desc.type == DataType::kFLOAT ? 4 : 2;
  return {data + offset * element, dtype_code(desc.type), {desc.dims.d[desc.dims.nbDims - 1], inner}};
}

void Plugin::check(replayssm_status status) {
  if (status != REPLAYSSM_OK) throw Refusal(replayssm_last_error());
}

template <typename F>
bool Plugin::guarded(F&& f) const noexcept {
  try {
    f();
    return true;
  } catch (const std::exception& e) {
    log_refusal(name_, node_.c_str(), e.what());
    return false;
  }
}

void Plugin::require_counts(int32_t num_inputs, int32_t num_outputs) const {
  auto require = [](const char* what, const std::vector<TensorSpec>& specs, int32_t given) {
    if (given == static_cast<int32_t>(specs.size())) return;
    std::string names;
    for (const TensorSpec& spec : specs) names += (names.empty() ? "" : ", ") + std::string(spec.name);
    throw Refusal(std::string(what) + ": expected " + std::to_string(specs.size()) + " (" + names + "), got " +
                  std::to_string(given));
  };
  require("inputs", inputs_, num_inputs);
  require("outputs", outputs_, num_outputs);
}

DataType Plugin::activation() const {
  switch (settings_.config.activation) {
    case REPLAYSSM_FP32:
      return DataType::kFLOAT;
    case REPLAYSSM_BF16:
      return DataType::kBF16;
    default:
      return DataType::kHALF;
  }
}

bool Plugin::accepts(TensorType expected, DataType given) const {
  switch (expected) {
    case TensorType::kInt32:
      return given == DataType::kINT32;
    case TensorType::kInt64:
      return given == DataType::kINT64;
    case TensorType::kIndex:
      return given == DataType::kINT32 || given == DataType::kINT64;
    case TensorType::kFloat:
      return is_float(given);
    default:
      return given == activation();
  }
}

// Checks the inputs' shapes, as far as they are known, against what the plugin wants and against each other.
// dim_of(i, d): rank for d = -1, else the size of dimension d, -1: not known.
template <typename DimOf>
Plugin::Sizes Plugin::checked_sizes(int32_t num_inputs, const DimOf& dim_of) const {
  Sizes sizes;
  for (int32_t i = 0; i < num_inputs; ++i) {
    const TensorSpec& spec = inputs_[i];
    const auto rank = static_cast<int32_t>(dim_of(i, -1));
    bool good = rank == static_cast<int32_t>(spec.dims.size());
    for (int32_t d = 0; good && d < rank; ++d) {
      const int64_t size = dim_of(i, d);
      if (size < 0) continue;
      const Dim& dim = spec.dims[d];
      auto same = [size](int64_t& known) {
        if (known < 0) known = size;
        return known == size;
      };
      good = dim.kind == Dim::kExactly   ? size == dim.size
             : dim.kind == Dim::kAtLeast ? size >= dim.size
             : dim.kind == Dim::kRows    ? same(sizes.rows)
             : dim.kind == Dim::kTokens  ? same(sizes.tokens)
                                         : same(sizes.plan_words);
    }
    if (!good) {
      std::string known;
      if (sizes.rows >= 0) known += ", rows " + std::to_string(sizes.rows);
      if (sizes.tokens >= 0) known += ", tokens " + std::to_string(sizes.tokens);
      throw Refusal(std::string(spec.name) + ": expected shape " + shape_text(spec.dims) + known + ", got " +
                    given_shape_text(rank, [&](int32_t d) { return dim_of(i, d); }));
    }
  }
  if (sizes.plan_words >= 0) {
    const int64_t planned = rows_of_plan(sizes.plan_words);
    if (sizes.rows < 0) sizes.rows = planned;
    if (planned != sizes.rows || plan_words(planned) != sizes.plan_words)
      throw Refusal("plan: expected " + std::to_string(sizes.rows < 0 ? 16 : plan_words(sizes.rows)) +
                    " words, those of a plan of " + std::to_string(sizes.rows) + " rows, got " +
                    std::to_string(sizes.plan_words));
  }
  return sizes;
}

nvinfer1::IPluginCapability* Plugin::getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept {
  switch (type) {
    case nvinfer1::PluginCapabilityType::kCORE:
      return static_cast<nvinfer1::IPluginV3OneCore*>(this);
    case nvinfer1::PluginCapabilityType::kBUILD:
      return static_cast<nvinfer1::IPluginV3OneBuildV2*>(this);
    case nvinfer1::PluginCapabilityType::kRUNTIME:
      return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
  }
  return nullptr;
}

nvinfer1::IPluginV3* Plugin::clone() noexcept {
  Plugin* result = nullptr;
  guarded([&] { result = copy(); });
  return result;
}

int32_t Plugin::getOutputDataTypes(DataType* outputs, int32_t num_outputs, const DataType* inputs,
                                   int32_t num_inputs) const noexcept {
  const bool good = guarded([&] {
    require_counts(num_inputs, num_outputs);
    if (!outputs || !inputs) throw Refusal("data types: expected an array, got none");
    for (int32_t i = 0; i < num_inputs; ++i) {
      static const char* const names[] = {"INT32", "INT64", "INT32 or INT64", "FP32, BF16 or FP16"};
      const TensorType type = inputs_[i].type;
      if (!accepts(type, inputs[i]))
        throw Refusal(std::string(inputs_[i].name) + ": expected " +
                      (type == TensorType::kActivation ? type_text(activation()) + " (the activation)"
                                                       : names[static_cast<int>(type)]) +
                      ", got " + type_text(inputs[i]));
    }
    for (int32_t i = 0; i < num_outputs; ++i)
      outputs[i] = outputs_[i].type == TensorType::kActivation ? activation() : DataType::kINT32;
  });
  return good ? 0 : -1;
}

int32_t Plugin::getOutputShapes(const DimsExprs* inputs, int32_t num_inputs, const DimsExprs*, int32_t,
                                DimsExprs* outputs, int32_t num_outputs, nvinfer1::IExprBuilder& builder) noexcept {
  const bool good = guarded([&] {
    require_counts(num_inputs, num_outputs);
    if (!outputs || !inputs) throw Refusal("shapes: expected an array, got none");
    checked_sizes(num_inputs, [&](int32_t i, int32_t d) -> int64_t {
      if (d < 0) return inputs[i].nbDims;
      const nvinfer1::IDimensionExpr* size = inputs[i].d[d];
      return size && size->isConstant() ? size->getConstantValue() : -1;
    });
    auto find = [&](Dim::Kind kind) -> const nvinfer1::IDimensionExpr* {
      for (int32_t i = 0; i < num_inputs; ++i) {
        for (size_t d = 0; d < inputs_[i].dims.size(); ++d) {
          if (inputs_[i].dims[d].kind == kind) return inputs[i].d[d];
        }
      }
      return nullptr;
    };
    using Op = nvinfer1::DimensionOperation;
    for (int32_t i = 0; i < num_outputs; ++i) {
      const std::vector<Dim>& dims = outputs_[i].dims;
      outputs[i].nbDims = static_cast<int32_t>(dims.size());
      for (size_t d = 0; d < dims.size(); ++d) {
        const nvinfer1::IDimensionExpr* size = nullptr;
        switch (dims[d].kind) {
          case Dim::kRows:
          case Dim::kTokens:
            size = find(dims[d].kind);
            break;
          case Dim::kPlanWords: {  // replayssm_plan_bytes, in units of 64 bytes
            const auto* bytes =
                builder.operation(Op::kSUM, *builder.constant(sizeof(replayssm_plan_header)),
                                  *builder.operation(Op::kPROD, *find(Dim::kRows),
                                                     *builder.constant(sizeof(replayssm_plan_row) + sizeof(int32_t))));
            size = builder.operation(Op::kPROD, *builder.operation(Op::kCEIL_DIV, *bytes, *builder.constant(64)),
                                     *builder.constant(64 / kWordBytes));
            break;
          }
          default:
            size = builder.constant(dims[d].size);
        }
        outputs[i].d[d] = size;
      }
    }
  });
  return good ? 0 : -1;
}

bool Plugin::supportsFormatCombination(int32_t position, const nvinfer1::DynamicPluginTensorDesc* tensors,
                                       int32_t num_inputs, int32_t num_outputs) noexcept {
  if (!tensors || num_inputs != static_cast<int32_t>(inputs_.size()) || num_outputs != getNbOutputs() || position < 0 ||
      position >= num_inputs + num_outputs)
    return false;
  const TensorSpec& spec = position < num_inputs ? inputs_[position] : outputs_[position - num_inputs];
  const nvinfer1::PluginTensorDesc& given = tensors[position].desc;
  return given.format == nvinfer1::TensorFormat::kLINEAR && accepts(spec.type, given.type);
}

int32_t Plugin::configurePlugin(const nvinfer1::DynamicPluginTensorDesc* inputs, int32_t num_inputs,
                                const nvinfer1::DynamicPluginTensorDesc*, int32_t num_outputs) noexcept {
  const bool good = guarded([&] {
    require_counts(num_inputs, num_outputs);
    if (!inputs) throw Refusal("inputs: expected an array, got none");
    auto check_dims = [&](auto&& dims_of) {
      checked_sizes(num_inputs, [&](int32_t i, int32_t d) -> int64_t {
        const Dims& dims = dims_of(inputs[i]);
        return d < 0 ? dims.nbDims : dims.d[d];
      });
    };
    check_dims([](const nvinfer1::DynamicPluginTensorDesc& t) -> const Dims& { return t.desc.dims; });
    check_dims([](const nvinfer1::DynamicPluginTensorDesc& t) -> const Dims& { return t.min; });
    check_dims([](const nvinfer1::DynamicPluginTensorDesc& t) -> const Dims& { return t.max; });
  });
  return good ? 0 : -1;
}

int32_t Plugin::getAliasedInput(int32_t output) noexcept {
  return state_io() == StateIo::kAlias && output >= 0 && output == returned_output_ ? returned_input_ : -1;
}

int32_t Plugin::onShapeChange(const nvinfer1::PluginTensorDesc* inputs, int32_t num_inputs,
                              const nvinfer1::PluginTensorDesc*, int32_t num_outputs) noexcept {
  const bool good = guarded([&] {
    require_counts(num_inputs, num_outputs);
    if (!inputs) throw Refusal("inputs: expected an array, got none");
    checked_sizes(num_inputs,
                  [&](int32_t i, int32_t d) -> int64_t { return d < 0 ? inputs[i].dims.nbDims : inputs[i].dims.d[d]; });
  });
  return good ? 0 : -1;
}

int32_t Plugin::enqueue(const nvinfer1::PluginTensorDesc* in, const nvinfer1::PluginTensorDesc*,
                        const void* const* inputs, void* const* outputs, void*, cudaStream_t stream) noexcept {
  if (state_io() == StateIo::kHostPointer && is_building()) return 0;
  const bool good = guarded([&] {
    if (attached_ && !replayssm_has_cuda())
      throw Refusal("this plugin library was built without CUDA: it runs no engine");
    if (!in || !inputs || !outputs) throw Refusal("tensors: expected arrays of inputs and outputs, got none");
    const auto num_inputs = static_cast<int32_t>(inputs_.size());
    const Sizes sizes = checked_sizes(
        num_inputs, [&](int32_t i, int32_t d) -> int64_t { return d < 0 ? in[i].dims.nbDims : in[i].dims.d[d]; });
    for (int32_t i = 0; i < num_inputs; ++i) {
      if (!inputs[i]) throw Refusal(std::string(inputs_[i].name) + ": expected an address, got none");
      if (!accepts(inputs_[i].type, in[i].type))
        throw Refusal(std::string(inputs_[i].name) + ": got " + type_text(in[i].type) + ", built for another type");
    }
    for (size_t i = 0; i < outputs_.size(); ++i) {
      if (!outputs[i]) throw Refusal(std::string(outputs_[i].name) + ": expected an address, got none");
    }
    if (sizes.rows > INT32_MAX || sizes.tokens > INT32_MAX) throw Refusal("shape: too large");
    run({in, inputs, outputs, static_cast<int32_t>(sizes.rows), static_cast<int32_t>(sizes.tokens), execution(stream)});
  });
  return good ? 0 : -1;
}

// A builder attaches plugins too, without a GPU as well, and crashes on a null; so what keeps the kernels from loading
// is left for enqueue to say.
nvinfer1::IPluginV3* Plugin::attachToContext(nvinfer1::IPluginResourceContext*) noexcept {
  replayssm_load_kernels();
  nvinfer1::IPluginV3* const result = clone();
  if (result) static_cast<Plugin*>(result)->attached_ = true;
  return result;
}

}  // namespace trtllm_replayssm
