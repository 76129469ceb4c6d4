// SPDX-License-Identifier: Apache-2.0
//
// The plugins without TensorRT: what a builder asks them, asked here, with TensorRT's headers alone.
//
//     plugin_test libtrtllm_replayssm_plugins.so
#include <cmath>
#include <functional>
#include <limits>
#include <random>

#include "library.h"
#include "replayssm/replayssm.h"

namespace {

using namespace plugin_library;
using nvinfer1::DataType;
using nvinfer1::DimensionOperation;
using nvinfer1::Dims;
using nvinfer1::DimsExprs;
using nvinfer1::IDimensionExpr;
using nvinfer1::TensorFormat;

// ---- expressions of dimensions, with a value or (as in a network of dynamic shape) without
// ------------------------------

class Expression : public IDimensionExpr, private nvinfer1::apiv::VDimensionExpr {
 public:
  Expression(bool known, int64_t size) : known_(known), size_(size) { mImpl = this; }
  int64_t size() const { return size_; }

 private:
  bool isConstant() const override { return known_; }
  int64_t getConstantValue() const override { return known_ ? size_ : -7; }
  bool isSizeTensor() const override { return false; }
  bool known_;
  int64_t size_;
};

class Builder : public nvinfer1::IExprBuilder, private nvinfer1::apiv::VExprBuilder {
 public:
  Builder() { mImpl = this; }
  const IDimensionExpr* of(bool known, int64_t size) {
    made_.push_back(std::make_unique<Expression>(known, size));
    return made_.back().get();
  }

 private:
  const IDimensionExpr* constant(int64_t value) override { return of(true, value); }
  const IDimensionExpr* operation(DimensionOperation op, const IDimensionExpr& a, const IDimensionExpr& b) override {
    const int64_t x = size_of(a), y = size_of(b);
    const bool known = a.isConstant() && b.isConstant();
    switch (op) {
      case DimensionOperation::kSUM:
        return of(known, x + y);
      case DimensionOperation::kPROD:
        return of(known, x * y);
      case DimensionOperation::kCEIL_DIV:
        return of(known, (x + y - 1) / y);
      default:
        std::exit(3);
    }
  }
  const IDimensionExpr* declareSizeTensor(int32_t, const IDimensionExpr&, const IDimensionExpr&) override {
    std::exit(3);
  }
  static int64_t size_of(const IDimensionExpr& e) { return static_cast<const Expression&>(e).size(); }
  std::vector<std::unique_ptr<Expression>> made_;
};

// ---- what each plugin must say, written down a second time
// --------------------------------------------------------------

struct Tensor {
  DataType type;
  std::vector<int64_t> shape;
};

struct Sizes {
  int32_t H = 8, P = 64, G = 2, N = 128, K = 4, L = 16, T = 4, slots = 12, layers = 3;
  int64_t rows = 5, tokens = 3, offset = 24;
  int64_t channels() const { return int64_t{H} * P + 2 * G * N; }
};

struct Case {
  std::string plugin, state_io;  // "lengths": host_pointer with plan_mode lengths
  DataType activation = DataType::kBF16;
  Sizes sizes;
  std::vector<Tensor> inputs, outputs;
  int32_t state_input = 0, state_output = -1;  // of the state or table, -1: none
};

const char* activation_name(DataType type) {
  return type == DataType::kFLOAT ? "fp32" : type == DataType::kBF16 ? "bf16" : "fp16";
}

replayssm_layout layout_of(const Case& c) {
  const Sizes& s = c.sizes;
  const replayssm_geometry geometry = {s.H, s.P, s.G, s.N, s.K};
  const int32_t dtype = c.activation == DataType::kFLOAT  ? REPLAYSSM_FP32
                        : c.activation == DataType::kBF16 ? REPLAYSSM_BF16
                                                          : REPLAYSSM_FP16;
  const replayssm_config config = {s.L, s.T, REPLAYSSM_CHECKPOINT_FP32, REPLAYSSM_READ_COPY_NONE, dtype, 9};
  replayssm_layout layout;
  CHECK(replayssm_layout_init(&geometry, &config, &layout) == REPLAYSSM_OK);
  return layout;
}

Fields fields_of(const Case& c) {
  const Sizes& s = c.sizes;
  Fields fields;
  fields.set("num_heads", s.H)
      .set("head_dim", s.P)
      .set("num_groups", s.G)
      .set("state_dim", s.N)
      .set("conv_kernel", s.K);
  fields.set("window", s.L).set("max_step_tokens", s.T).set("checkpoint", "fp32").set("read_copy", "none");
  fields.set("activation", activation_name(c.activation)).set("seed", "18446744073709551615");
  const bool lengths = c.state_io == "lengths";
  fields.set("num_slots", s.slots).set("state_io", lengths ? "host_pointer" : c.state_io.c_str());
  fields.set("plan_mode", lengths ? "lengths" : "cursors");
  fields.set("num_layers", s.layers);
  if (c.plugin == "ReplaySsmPlan") return fields;
  fields.set("layer", 2).set("slot_stride", 0);
  if (c.plugin != "ReplayCausalConv") fields.set("first_head", 96);
  if (c.plugin == "ReplayCausalConv") fields.set("in_offset", static_cast<int32_t>(s.offset));
  if (c.plugin == "ReplaySsmStep")
    fields.set("dt_offset", static_cast<int32_t>(s.offset)).set("dt_min", 0.25f).set("dt_max", INFINITY);
  return fields;
}

Case make_case(const std::string& plugin, const std::string& state_io, DataType activation, int64_t rows,
               int64_t tokens) {
  Case c;
  c.plugin = plugin, c.state_io = state_io, c.activation = activation;
  c.sizes.rows = rows, c.sizes.tokens = tokens;
  const Sizes& s = c.sizes;
  const int64_t B = rows, S = tokens, D = s.channels(), H = s.H;
  const bool alias = state_io == "alias", lengths = state_io == "lengths";
  const bool pointer = lengths || state_io == "host_pointer";
  const int64_t words = replayssm_plan_bytes(static_cast<int32_t>(B)) / 4;
  const auto i32 = DataType::kINT32;
  const Tensor order = {i32, {1}};
  const Tensor table = {i32, {replayssm_table_bytes(s.slots, s.layers) / 4}};
  const Tensor table_head = {i32, {32}}, each_row = {i32, {B}};
  const auto tokens_by = [&](int64_t columns) {
    return lengths ? std::vector<int64_t>{S, columns} : std::vector<int64_t>{B, S, columns};
  };
  const Tensor state = plugin == "ReplaySsmPlan" ? table : Tensor{i32, {s.slots, layout_of(c).slot_stride / 4}};
  const Tensor memory = pointer ? Tensor{DataType::kINT64, {1}} : state;
  bool returns_state = alias;
  if (plugin == "ReplaySsmPlan" && lengths) {
    c.inputs = {each_row, each_row, each_row, each_row, each_row};
    c.outputs = {{i32, {words}}, table_head};
    return c;
  }
  if (plugin == "ReplaySsmPlan") {
    c.inputs = {{i32, {B}}, {i32, {B}}, {i32, {B}}, {DataType::kINT64, {B, S}}};
    c.outputs = {{i32, {words}}, {i32, {8}}};
    returns_state = !pointer;
  } else if (plugin == "ReplayCausalConv") {
    c.inputs = {{i32, {words}},
                {activation, tokens_by(s.offset + D + 3)},
                {DataType::kFLOAT, {D, s.K}},
                {DataType::kHALF, {D}}};
    c.outputs = {{activation, tokens_by(D)}};
    if (lengths) c.inputs.insert(c.inputs.end(), {each_row, each_row});
    if (!alias) c.outputs.push_back(order);
  } else if (plugin == "ReplaySsmFlush") {
    c.inputs = {{i32, {words}}, {DataType::kBF16, {H}}};
    if (!alias) c.inputs.push_back(order), c.outputs.push_back(order);
  } else {
    c.inputs = {{i32, {words}},          {activation, tokens_by(D)}, {DataType::kFLOAT, tokens_by(s.offset + H)},
                {DataType::kFLOAT, {H}}, {DataType::kFLOAT, {H}},    {DataType::kFLOAT, {H}}};
    if (lengths) c.inputs.insert(c.inputs.end(), {each_row, each_row});
    if (!alias) c.inputs.push_back(order);
    c.outputs = {{activation, tokens_by(H * s.P)}};
    returns_state = !pointer;
  }
  if (plugin != "ReplaySsmPlan") c.inputs.insert(c.inputs.begin() + 1, lengths ? table_head : pointer ? memory : table);
  c.state_input = static_cast<int32_t>(c.inputs.size());
  c.inputs.push_back(memory);
  if (returns_state) {
    c.state_output = static_cast<int32_t>(c.outputs.size());
    c.outputs.push_back(state);
  }
  return c;
}

// ---- asking
// ----------------------------------------------------------------------------------------------------------------

// The questions of a builder about a node with these inputs. Each tells whether the plugin took them.
struct Questions {
  PluginV3& plugin;
  std::vector<Tensor> inputs;
  std::vector<Tensor> outputs;
  TensorFormat format = TensorFormat::kLINEAR;

  bool types(std::vector<DataType>* given = nullptr) const {
    std::vector<DataType> in, out(outputs.size() + 1, DataType::kFP4);
    for (const Tensor& t : inputs) in.push_back(t.type);
    const bool good = plugin.build->getOutputDataTypes(out.data(), static_cast<int32_t>(outputs.size()), in.data(),
                                                       static_cast<int32_t>(in.size())) == 0;
    if (given) given->assign(out.begin(), out.end() - 1);
    return good;
  }

  bool shapes(bool known, std::vector<std::vector<int64_t>>* given = nullptr) const {
    Builder builder;
    std::vector<DimsExprs> in(inputs.size() + 1), out(outputs.size() + 1);
    for (size_t i = 0; i < inputs.size(); ++i) {
      in[i].nbDims = static_cast<int32_t>(inputs[i].shape.size());
      for (int32_t d = 0; d < in[i].nbDims; ++d) {
        const bool dynamic = !known && varies(inputs[i], d);
        in[i].d[d] = builder.of(!dynamic, inputs[i].shape[d]);
      }
    }
    const bool good = plugin.build->getOutputShapes(in.data(), static_cast<int32_t>(inputs.size()), nullptr, 0,
                                                    out.data(), static_cast<int32_t>(outputs.size()), builder) == 0;
    if (given && good) {
      for (size_t i = 0; i < outputs.size(); ++i) {
        given->emplace_back();
        for (int32_t d = 0; d < out[i].nbDims; ++d)
          given->back().push_back(static_cast<const Expression*>(out[i].d[d])->size());
      }
    }
    return good;
  }

  bool formats(int32_t position) const {
    std::vector<nvinfer1::DynamicPluginTensorDesc> all = descriptions();
    return plugin.build->supportsFormatCombination(position, all.data(), static_cast<int32_t>(inputs.size()),
                                                   static_cast<int32_t>(outputs.size()));
  }

  bool configured() const {
    std::vector<nvinfer1::DynamicPluginTensorDesc> all = descriptions();
    return plugin.build->configurePlugin(all.data(), static_cast<int32_t>(inputs.size()), all.data() + inputs.size(),
                                         static_cast<int32_t>(outputs.size())) == 0;
  }

  bool shape_changed() const {
    std::vector<nvinfer1::PluginTensorDesc> all;
    for (const auto& d : descriptions()) all.push_back(d.desc);
    return plugin.runtime->onShapeChange(all.data(), static_cast<int32_t>(inputs.size()), all.data() + inputs.size(),
                                         static_cast<int32_t>(outputs.size())) == 0;
  }

  bool everything() const {
    bool good = types() && shapes(true) && shapes(false) && configured() && shape_changed();
    for (size_t i = 0; i < inputs.size() + outputs.size(); ++i) good = good && formats(static_cast<int32_t>(i));
    return good;
  }

 private:
  // Rows, tokens and plans are of dynamic size in a network; a tensor of activations also has a fixed last dimension.
  static bool varies(const Tensor& t, int32_t d) { return t.shape.size() == 3 ? d < 2 : t.shape[0] == t.shape[d]; }

  std::vector<nvinfer1::DynamicPluginTensorDesc> descriptions() const {
    std::vector<nvinfer1::DynamicPluginTensorDesc> all;
    for (const std::vector<Tensor>* list : {&inputs, &outputs}) {
      for (const Tensor& t : *list) {
        nvinfer1::DynamicPluginTensorDesc description{};
        Dims dims{};
        dims.nbDims = static_cast<int32_t>(t.shape.size());
        for (size_t d = 0; d < t.shape.size(); ++d) dims.d[d] = t.shape[d];
        description.desc = {dims, t.type, format, 1.0f};
        description.min = description.opt = description.max = dims;
        all.push_back(description);
      }
    }
    return all;
  }
};

const DataType kTypes[] = {DataType::kFLOAT, DataType::kHALF, DataType::kINT8, DataType::kINT32, DataType::kBOOL,
                           DataType::kUINT8, DataType::kFP8,  DataType::kBF16, DataType::kINT64};
const DataType kActivations[] = {DataType::kFLOAT, DataType::kHALF, DataType::kBF16};
const char* const kPlugins[] = {"ReplaySsmPlan", "ReplayCausalConv", "ReplaySsmFlush", "ReplaySsmStep"};
const char* const kStateIos[] = {"alias", "same_pointer", "host_pointer", "lengths"};

IPluginCreatorV3One* creator_of(const std::string& plugin) {
  for (IPluginCreatorV3One* creator : creators()) {
    if (plugin == creator->getPluginName()) return creator;
  }
  std::exit(3);
}

bool mentions(const char* text, const std::string& what) { return std::strstr(text, what.c_str()) != nullptr; }

// ---- tests
// ---------------------------------------------------------------------------------------------------------------------

void for_each_case(const std::function<void(const Case&, PluginV3&)>& f) {
  for (const char* plugin : kPlugins) {
    for (const char* state_io : kStateIos) {
      for (const DataType activation : kActivations) {
        for (const auto& [rows, tokens] : {std::pair<int64_t, int64_t>{1, 1}, {5, 3}, {256, 17}, {15, 2048}, {16, 4}}) {
          const Case c = make_case(plugin, state_io, activation, rows, tokens);
          PluginV3 made = create(creator_of(plugin), fields_of(c).list());
          CHECK(made);
          f(c, made);
        }
      }
    }
  }
}

bool same_fields(const nvinfer1::PluginFieldCollection* a, const std::vector<PluginField>& b) {
  bool same = a && a->nbFields == static_cast<int32_t>(b.size());
  for (int32_t i = 0; same && i < a->nbFields; ++i) {
    const PluginField& x = a->fields[i];
    const size_t element = x.type == PluginFieldType::kCHAR ? 1 : 4;
    same = std::strcmp(x.name, b[i].name) == 0 && x.type == b[i].type && x.length == b[i].length &&
           std::memcmp(x.data, b[i].data, element * static_cast<size_t>(x.length)) == 0;
  }
  return same;
}

void test_identity() {
  CHECK(creators().size() == 4);
  for (const char* plugin : kPlugins) {
    IPluginCreatorV3One* creator = creator_of(plugin);
    CHECK(std::strcmp(creator->getPluginVersion(), "1") == 0);
    CHECK(std::strcmp(creator->getPluginNamespace(), "trtllm_replayssm") == 0);
    const Case c = make_case(plugin, "alias", DataType::kBF16, 5, 3);
    const Fields fields = fields_of(c);
    const std::vector<PluginField> given = fields.list();
    const nvinfer1::PluginFieldCollection* names = creator->getFieldNames();
    CHECK(names->nbFields == static_cast<int32_t>(given.size()));
    for (int32_t i = 0; i < names->nbFields; ++i)
      CHECK(std::strcmp(names->fields[i].name, given[i].name) == 0 && names->fields[i].type == given[i].type);
  }
}

// fields -> plugin -> fields -> plugin of an engine -> fields, and the same through clones, whose originals are gone.
void test_round_trip() {
  for_each_case([](const Case& c, PluginV3& made) {
    const Fields fields = fields_of(c);
    const std::vector<PluginField> given = fields.list();
    CHECK(std::strcmp(made.core->getPluginName(), c.plugin.c_str()) == 0);
    CHECK(std::strcmp(made.core->getPluginVersion(), "1") == 0);
    CHECK(std::strcmp(made.core->getPluginNamespace(), "trtllm_replayssm") == 0);
    CHECK(same_fields(made.runtime->getFieldsToSerialize(), given));
    const nvinfer1::PluginFieldCollection* serialized = made.runtime->getFieldsToSerialize();
    PluginV3 again(creator_of(c.plugin)->createPlugin(nullptr, serialized, TensorRTPhase::kRUNTIME));
    CHECK(again && same_fields(again.runtime->getFieldsToSerialize(), given));
    CHECK(std::strcmp(again.build->getMetadataString(), made.build->getMetadataString()) == 0);

    PluginV3 clone(again.plugin->clone());
    again = PluginV3(nullptr);
    PluginV3 second(clone.plugin->clone());
    clone = PluginV3(nullptr);
    PluginV3 attached(second.runtime->attachToContext(nullptr));
    second = PluginV3(nullptr);
    CHECK(same_fields(attached.runtime->getFieldsToSerialize(), given));
    CHECK(std::strcmp(attached.core->getPluginName(), c.plugin.c_str()) == 0);
    CHECK(attached.build->getNbOutputs() == static_cast<int32_t>(c.outputs.size()));
    if (!replayssm_has_cuda()) {  // must not take an engine's device memory for its own
      CHECK(attached.runtime->enqueue(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr) != 0);
      CHECK(mentions(last_error(), "this plugin library was built without CUDA"));
    }

    std::string metadata;
    for (const PluginField& field : given) {
      const std::string value = field.type == PluginFieldType::kCHAR ? static_cast<const char*>(field.data)
                                : field.type == PluginFieldType::kINT32
                                    ? std::to_string(*static_cast<const int32_t*>(field.data))
                                : std::strcmp(field.name, "dt_min") == 0 ? "0.25"
                                                                         : "inf";
      metadata += (metadata.empty() ? "" : " ") + std::string(field.name) + "=" + value;
    }
    CHECK(metadata == made.build->getMetadataString());
  });
}

void test_legal_answers() {
  for_each_case([](const Case& c, PluginV3& made) {
    CHECK(made.build->getNbOutputs() == static_cast<int32_t>(c.outputs.size()));
    const Questions ask{made, c.inputs, c.outputs};
    std::vector<DataType> types;
    CHECK(ask.types(&types));
    for (size_t i = 0; i < types.size(); ++i) CHECK(types[i] == c.outputs[i].type);
    for (const bool known : {true, false}) {
      std::vector<std::vector<int64_t>> shapes;
      CHECK(ask.shapes(known, &shapes));
      for (size_t i = 0; i < shapes.size(); ++i) CHECK(shapes[i] == c.outputs[i].shape);
    }
    CHECK(ask.everything());
    for (int32_t output = -2; output < 6; ++output) {
      const bool aliased = c.state_io == "alias" && output >= 0 && output == c.state_output;
      CHECK(made.build->getAliasedInput(output) == (aliased ? c.state_input : -1));
    }
    CHECK(made.build->getWorkspaceSize(nullptr, 0, nullptr, 0) == 0);
    CHECK(made.build->getNbTactics() == 0 && made.runtime->setTactic(0) == 0);
    for (size_t i = 0; i < c.inputs.size(); ++i) {  // exactly the types that the documentation lists
      for (const DataType type : kTypes) {
        Questions other = ask;
        other.inputs[i].type = type;
        const DataType own = c.inputs[i].type;
        const bool is_float = type == DataType::kFLOAT || type == DataType::kHALF || type == DataType::kBF16;
        const bool any_float = (c.plugin == "ReplayCausalConv" && (i == 3 || i == 4)) ||
                               (c.plugin == "ReplaySsmFlush" && i == 2) ||
                               (c.plugin == "ReplaySsmStep" && i >= 3 && i <= 6);
        const bool index = c.plugin == "ReplaySsmPlan" && i == 3 && c.state_io != "lengths";
        const bool legal = any_float ? is_float : index ? type == DataType::kINT32 || type == own : type == own;
        CHECK(other.types() == legal && other.formats(static_cast<int32_t>(i)) == legal);
      }
    }
  });
}

// One thing of a good node is made wrong at random: some answer must be no, in words that name the tensor or its
// number.
void test_illegal_combinations() {
  std::mt19937 random(1);
  auto below = [&](size_t limit) { return std::uniform_int_distribution<size_t>(0, limit - 1)(random); };
  int refused = 0;
  for (int i = 0; i < 2000; ++i) {
    Case c = make_case(kPlugins[below(4)], kStateIos[below(4)], kActivations[below(3)],
                       2 + static_cast<int64_t>(below(40)), 2 + static_cast<int64_t>(below(40)));
    PluginV3 made = create(creator_of(c.plugin), fields_of(c).list());
    CHECK(made);
    Questions ask{made, c.inputs, c.outputs};
    const size_t at = below(c.inputs.size());
    Tensor& tensor = ask.inputs[at];
    switch (below(8)) {
      case 0:
        tensor.type = kTypes[below(std::size(kTypes))];
        if (ask.types()) continue;  // drew a good one
        break;
      case 1:
        tensor.shape.push_back(1);
        break;
      case 2:
        tensor.shape.pop_back();
        break;
      case 3: {  // elements less somewhere; 4 are more than `in` has to spare
        const size_t d = below(tensor.shape.size());
        const bool only_one_with_tokens =
            (c.plugin == "ReplaySsmPlan" && at == 3) || (c.plugin == "ReplayCausalConv" && at == 2);
        if (d == 1 && only_one_with_tokens) continue;  // any number is legal
        tensor.shape[d] -= d == 2 ? 4 : 1;
        break;
      }
      case 4:
        ask.inputs.pop_back();
        break;
      case 5:
        ask.inputs.push_back(tensor);
        break;
      case 6:
        ask.outputs.resize(below(2) ? ask.outputs.size() + 1 : ask.outputs.size() - 1, {DataType::kINT32, {1}});
        break;
      default:
        ask.format = static_cast<TensorFormat>(1 + below(4));
    }
    CHECK(!ask.everything());
    ++refused;
  }
  CHECK(refused > 1500);
  std::printf("%d illegal combinations refused\n", refused);
}

void test_null_arrays() {
  for_each_case([](const Case& c, PluginV3& made) {
    const auto in = static_cast<int32_t>(c.inputs.size()), out = static_cast<int32_t>(c.outputs.size());
    Builder builder;
    DataType type{};
    CHECK(made.build->getOutputDataTypes(nullptr, out, nullptr, in) != 0);
    CHECK(made.build->getOutputDataTypes(&type, out, nullptr, in) != 0);
    CHECK(made.build->getOutputShapes(nullptr, in, nullptr, 0, nullptr, out, builder) != 0);
    CHECK(made.build->configurePlugin(nullptr, in, nullptr, out) != 0);
    CHECK(made.runtime->onShapeChange(nullptr, in, nullptr, out) != 0);
    CHECK(!made.build->supportsFormatCombination(0, nullptr, in, out));
    CHECK(made.runtime->enqueue(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr) != 0);
    setenv("IS_BUILDING", "1", 1);  // TensorRT-LLM's builder: addresses in host memory are placeholders
    CHECK((made.runtime->enqueue(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr) == 0) ==
          (c.state_io == "host_pointer" || c.state_io == "lengths"));
    unsetenv("IS_BUILDING");
    Questions ask{made, c.inputs, c.outputs};
    CHECK(!ask.formats(-1) && !ask.formats(in + out));
    CHECK(made.plugin->getCapabilityInterface(static_cast<nvinfer1::PluginCapabilityType>(7)) == nullptr);
  });
}

// Each field missing, doubled, of each wrong type, of a wrong length, without data; and values that mean nothing.
void test_illegal_fields() {
  int refused = 0;
  for (const char* plugin : kPlugins) {
    const Case c = make_case(plugin, "alias", DataType::kBF16, 5, 3);
    IPluginCreatorV3One* creator = creator_of(plugin);
    auto refuse = [&](const std::vector<PluginField>& fields, const std::string& name) {
      CHECK(!create(creator, fields));
      CHECK(mentions(last_error(), std::string(plugin) + " 'node': ") && mentions(last_error(), name));
      ++refused;
    };
    for (const std::string& name : fields_of(c).names()) {
      refuse(fields_of(c).remove(name).list(), name + ": field is missing");
      const Fields doubled = fields_of(c);
      std::vector<PluginField> twice = doubled.list();
      for (const PluginField& field : doubled.list()) {
        if (name == field.name) twice.push_back(field);
      }
      refuse(twice, name + ": given twice");
      refuse(fields_of(c).drop_data(name).list(), name + ": expected");
      for (int32_t type = 0; type <= static_cast<int32_t>(PluginFieldType::kFP4); ++type) {
        const auto changed = static_cast<PluginFieldType>(type);
        const PluginFieldType own = fields_of(c).type_of(name);
        const bool same_width = (own == PluginFieldType::kFLOAT32 && changed == PluginFieldType::kINT32);
        const bool wider = (own == PluginFieldType::kINT32 && changed == PluginFieldType::kINT64) ||
                           (own == PluginFieldType::kFLOAT32 && changed == PluginFieldType::kFLOAT64);
        if (changed == own || same_width || wider) continue;
        refuse(fields_of(c).retype(name, changed, 1).list(), name + ": expected");
      }
      for (const int32_t length : {-1, 0, 1000}) {
        const PluginFieldType own = fields_of(c).type_of(name);
        refuse(fields_of(c).retype(name, own, length).list(), name + ": expected");
      }
    }
    refuse(fields_of(c).set("nope", 1).list(), "'nope': no such field");
    const Fields fields = fields_of(c);
    std::vector<PluginField> nameless = fields.list();
    nameless[0].name = nullptr;
    refuse(nameless, "'': no such field");
    CHECK(creator->createPlugin("node", nullptr, TensorRTPhase::kBUILD) == nullptr);
    nvinfer1::PluginFieldCollection empty{};
    CHECK(creator->createPlugin("node", &empty, TensorRTPhase::kBUILD) == nullptr);
    empty.nbFields = 3;
    CHECK(creator->createPlugin("node", &empty, TensorRTPhase::kRUNTIME) == nullptr);

    refuse(fields_of(c).set("num_heads", 0).list(), "num_heads: expected");
    refuse(fields_of(c).set("num_heads", int64_t{1} << 33).list(), "num_heads: expected an integer of 32 bits");
    refuse(fields_of(c).set("head_dim", 12).list(), "head_dim: expected a multiple of 8");
    refuse(fields_of(c).set("num_groups", 3).list(), "num_groups: expected a divisor");
    refuse(fields_of(c).set("window", 65).list(), "window: expected 1..64");
    refuse(fields_of(c).set("max_step_tokens", 17).list(), "max_step_tokens: expected");
    refuse(fields_of(c).set("checkpoint", "fp64").list(), "checkpoint: expected one of 'fp32'");
    refuse(fields_of(c).set("read_copy", "bf16").list(), "read_copy: expected one of 'none'");
    refuse(fields_of(c).set("activation", "int8").list(),
           "activation: expected one of 'fp32', 'bf16', 'fp16', got 'int8'");
    refuse(fields_of(c).set("seed", "18446744073709551616").list(), "seed: expected decimal digits");
    refuse(fields_of(c).set("seed", "-1").list(), "seed: expected decimal digits");
    refuse(fields_of(c).set("num_slots", 0).list(), "num_slots: expected");
    refuse(fields_of(c).set("state_io", "").list(), "state_io: expected one of");
    refuse(fields_of(c).set("plan_mode", "tokens").list(), "plan_mode: expected one of 'cursors', 'lengths'");
    refuse(fields_of(c).set("plan_mode", "lengths").list(), "plan_mode: 'lengths' expects state_io 'host_pointer'");
    refuse(fields_of(c).set("num_layers", 0).list(), "num_layers: expected");
    refuse(fields_of(c).set("num_slots", INT32_MAX).list(), "num_slots: a table of");
    if (c.plugin == "ReplaySsmPlan") continue;
    const int32_t stride = static_cast<int32_t>(layout_of(c).slot_stride);
    CHECK(create(creator, fields_of(c).set("slot_stride", stride + 256).list()));
    refuse(fields_of(c).set("slot_stride", stride - 256).list(), "slot_stride: expected");
    refuse(fields_of(c).set("slot_stride", stride + 128).list(), "slot_stride: expected");
    refuse(fields_of(c).set("layer", -1).list(), "layer: expected 0..2");
    refuse(fields_of(c).set("layer", 3).list(), "layer: expected 0..2");
    if (c.plugin != "ReplayCausalConv") refuse(fields_of(c).set("first_head", -1).list(), "first_head: expected");
    if (c.plugin == "ReplayCausalConv") refuse(fields_of(c).set("in_offset", -1).list(), "in_offset: expected");
    if (c.plugin == "ReplaySsmStep") {
      refuse(fields_of(c).set("dt_offset", -8).list(), "dt_offset: expected");
      refuse(fields_of(c).set("dt_min", -1.f).list(), "dt_min, dt_max: expected");
      refuse(fields_of(c).set("dt_max", 0.f).list(), "dt_min, dt_max: expected");
      refuse(fields_of(c).set("dt_max", NAN).list(), "dt_min, dt_max: expected");
    }
  }
  std::printf("%d illegal collections of fields refused\n", refused);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s LIBRARY\n", argv[0]);
    return 2;
  }
  if (!std::freopen("/dev/null", "w", stderr)) return 2;  // refusals by the thousand; CHECK writes to stdout instead
  plugin_library::open(argv[1]);
  test_identity();
  test_round_trip();
  test_legal_answers();
  test_illegal_combinations();
  test_null_arrays();
  test_illegal_fields();
  std::printf("plugin_test: passed\n");
  return 0;
}
