// SPDX-License-Identifier: Apache-2.0
//
// The plugins at work, without an engine: made by a real plugin registry, called as an engine calls them, and compared
// bit for bit with the C ABI.
//
//     plugin_harness LIBRARY [--registry LIBNVINFER] [--steps N] [--quick] [--part I/N] [--threads N]
//                    [--output FILE] [--commit ID] [--command TEXT]
//
// Two execution contexts (clones of the same plugins, each with slots, memory and a stream of its own) take turns for N
// steps: batches of random slots, idle rows, tokens and acceptance, prompts and new sequences among them. Every row is
// done a second time by plan, conv_step, step or prefill, and commit of that row alone, by tensors of x, B and C where
// the plugins' steps have x and B in the rings. Outputs, slots and cursors must be the same bits; what lies behind a
// row's tokens holds NaN and must neither be read nor written, nor may what a step leaves out of xBC. With plans of
// lengths (state_io "lengths") the tokens are packed, prompts and decode steps of one token alternate, and slots are
// never cleared; the second time is by cursors all the same. On a GPU each case runs eagerly and captured in CUDA
// graphs, whose capture is the very first call. A library without CUDA ops runs on host memory.
#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <ctime>
#include <fstream>
#include <random>
#include <sstream>
#include <thread>

#ifdef REPLAYSSM_HARNESS_CUDA
#include <cuda_runtime.h>
#endif

#include "../src/tensorrt_abi.h"
#include "library.h"
#include "replayssm/replayssm.h"

namespace {

using namespace plugin_library;
using nvinfer1::DataType;
using nvinfer1::PluginTensorDesc;

#define REQUIRE_OP(call) CHECK((call) == REPLAYSSM_OK || op_failed())

bool op_failed() {
  std::printf("libreplayssm: %s\n", replayssm_last_error());
  return false;
}

// ---- memory and streams of the device under test
// ----------------------------------------------------------------------------

#ifdef REPLAYSSM_HARNESS_CUDA

#define REQUIRE_CUDA(call)                                        \
  do {                                                            \
    const cudaError_t error_ = (call);                            \
    if (error_ != cudaSuccess) {                                  \
      std::printf("%s: %s\n", #call, cudaGetErrorString(error_)); \
      CHECK(error_ == cudaSuccess);                               \
    }                                                             \
  } while (0)

constexpr replayssm_device kDevice = REPLAYSSM_CUDA;

void* allocate(size_t bytes) {
  void* memory = nullptr;
  REQUIRE_CUDA(cudaMalloc(&memory, bytes));
  REQUIRE_CUDA(cudaMemset(memory, 0, bytes));
  REQUIRE_CUDA(cudaStreamSynchronize(nullptr));
  return memory;
}
void release(void* memory) { cudaFree(memory); }

// Pinned memory through which a stream's copies go, so that none of them waits for it. What is copied out is there
// after the next finish().
class Staging {
 public:
  Staging() {
    void* memory = nullptr;
    REQUIRE_CUDA(cudaMallocHost(&memory, kBytes));
    memory_ = static_cast<char*>(memory);
  }
  Staging(const Staging&) = delete;
  void in(void* device, const void* host, size_t bytes, cudaStream_t stream) {
    void* const staged = std::memcpy(take(bytes, stream), host, bytes);
    REQUIRE_CUDA(cudaMemcpyAsync(device, staged, bytes, cudaMemcpyHostToDevice, stream));
  }
  void out(void* host, const void* device, size_t bytes, cudaStream_t stream) {
    char* const staged = take(bytes, stream);
    REQUIRE_CUDA(cudaMemcpyAsync(staged, device, bytes, cudaMemcpyDeviceToHost, stream));
    expected_.push_back({host, staged, bytes});
  }
  void finish(cudaStream_t stream) {
    REQUIRE_CUDA(cudaStreamSynchronize(stream));
    for (const auto& [host, staged, bytes] : expected_) std::memcpy(host, staged, bytes);
    expected_.clear();
    used_ = 0;
  }

 private:
  static constexpr size_t kBytes = size_t{32} << 20;
  struct Expected {
    void* host;
    const void* staged;
    size_t bytes;
  };
  char* take(size_t bytes, cudaStream_t stream) {
    CHECK(bytes <= kBytes);
    if (used_ + bytes > kBytes) finish(stream);
    char* const result = memory_ + used_;
    used_ = (used_ + bytes + 255) / 256 * 256;
    return result;
  }

  char* memory_ = nullptr;
  size_t used_ = 0;
  std::vector<Expected> expected_;
};

// Streams are used again by later contexts of the thread, with their staging memory.
thread_local std::map<cudaStream_t, Staging> stagings;
thread_local std::vector<cudaStream_t> idle_streams;

cudaStream_t make_stream() {
  cudaStream_t stream = nullptr;
  if (idle_streams.empty()) {
    REQUIRE_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  } else {
    stream = idle_streams.back();
    idle_streams.pop_back();
  }
  return stream;
}
void release_stream(cudaStream_t stream) { idle_streams.push_back(stream); }
void copy_in(void* device, const void* host, size_t bytes, cudaStream_t stream) {
  stagings[stream].in(device, host, bytes, stream);
}
void fill(void* device, int byte, size_t bytes, cudaStream_t stream) {
  REQUIRE_CUDA(cudaMemsetAsync(device, byte, bytes, stream));
}
void copy_out(void* host, const void* device, size_t bytes, cudaStream_t stream) {
  stagings[stream].out(host, device, bytes, stream);
}
void wait(cudaStream_t stream) { stagings[stream].finish(stream); }
std::string device_name() {
  cudaDeviceProp properties;
  REQUIRE_CUDA(cudaGetDeviceProperties(&properties, 0));
  return properties.name;
}

// A captured sequence of calls. Under capture the thread may call nothing that synchronises or allocates.
class Graph {
 public:
  template <typename Launch>
  Graph(cudaStream_t stream, const Launch& launch) {
    cudaGraph_t graph = nullptr;
    REQUIRE_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    launch();
    REQUIRE_CUDA(cudaStreamEndCapture(stream, &graph));
    REQUIRE_CUDA(cudaGraphInstantiate(&executable_, graph, 0));
    cudaGraphDestroy(graph);
  }
  void launch(cudaStream_t stream) const { REQUIRE_CUDA(cudaGraphLaunch(executable_, stream)); }

 private:
  cudaGraphExec_t executable_ = nullptr;
};

#else

constexpr replayssm_device kDevice = REPLAYSSM_HOST;

void* allocate(size_t bytes) {
  void* const memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  std::memset(memory, 0, bytes);
  return memory;
}
void release(void* memory) { std::free(memory); }
cudaStream_t make_stream() { return nullptr; }
void release_stream(cudaStream_t) {}
void copy_in(void* device, const void* host, size_t bytes, cudaStream_t) { std::memcpy(device, host, bytes); }
void fill(void* device, int byte, size_t bytes, cudaStream_t) { std::memset(device, byte, bytes); }
void copy_out(void* host, const void* device, size_t bytes, cudaStream_t) { std::memcpy(host, device, bytes); }
void wait(cudaStream_t) {}
std::string device_name() { return "host"; }

#endif

class Buffer {
 public:
  explicit Buffer(size_t bytes) : bytes_(bytes), data_(allocate(bytes)) {}
  Buffer(Buffer&& other) noexcept : bytes_(other.bytes_), data_(std::exchange(other.data_, nullptr)) {}
  Buffer(const Buffer&) = delete;
  ~Buffer() {
    if (data_) release(data_);
  }
  void* data() const { return data_; }
  char* at(int64_t offset) const { return static_cast<char*>(data_) + offset; }
  size_t bytes() const { return bytes_; }
  template <typename T>
  void put(const std::vector<T>& values, cudaStream_t stream) const {
    copy_in(data_, values.data(), values.size() * sizeof(T), stream);
  }
  // Filled after the next wait.
  std::vector<char> get(cudaStream_t stream) const { return get(stream, bytes_); }
  std::vector<char> get(cudaStream_t stream, size_t bytes) const {
    std::vector<char> values(bytes);
    copy_out(values.data(), data_, bytes, stream);
    return values;
  }

 private:
  size_t bytes_;
  void* data_;
};

// ---- what is run
// ----------------------------------------------------------------------------------------------------------------

constexpr int32_t kFew = 24, kFewLengths = 32;  // steps after which every case has flushed
constexpr int32_t kSlots = 6, kRows = 4, kMostTokens = 40, kLayers = 2, kFirstHead = 24;

struct Setup {
  replayssm_geometry geometry;
  replayssm_config config;
  std::string state_io;  // "lengths": host_pointer with plan_mode lengths
  bool captured;
  int32_t steps;

  bool of_lengths() const { return state_io == "lengths"; }
  int64_t inner() const { return int64_t{geometry.num_heads} * geometry.head_dim; }
  int64_t channels() const { return inner() + 2 * int64_t{geometry.num_groups} * geometry.state_dim; }
  int64_t projected() const { return inner() + channels() + geometry.num_heads; }  // z | x | B | C | dt
  int64_t dt_offset() const { return inner() + channels(); }
  int64_t element() const { return config.activation == REPLAYSSM_FP32 ? 4 : 2; }
  DataType type() const {
    return config.activation == REPLAYSSM_FP32   ? DataType::kFLOAT
           : config.activation == REPLAYSSM_BF16 ? DataType::kBF16
                                                 : DataType::kHALF;
  }
};

// Bits of a value near `value` in an activation type; rounding does not matter.
void store(const Setup& setup, char* target, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  uint16_t half = 0;
  switch (setup.config.activation) {
    case REPLAYSSM_FP32:
      std::memcpy(target, &bits, 4);
      return;
    case REPLAYSSM_BF16:
      half = static_cast<uint16_t>(bits >> 16);
      break;
    default:
      if (std::isnan(value)) {
        half = 0x7e00;
      } else if (std::fabs(value) >= 6.2e-5f) {  // smaller ones count as zero
        const auto exponent = static_cast<int32_t>((bits >> 23) & 0xff) - 112;
        half =
            static_cast<uint16_t>((bits >> 16 & 0x8000) | static_cast<uint32_t>(exponent) << 10 | (bits >> 13 & 0x3ff));
      }
  }
  std::memcpy(target, &half, 2);
}

struct LayerWeights {
  Buffer conv_weight, conv_bias, A_log, D, dt_bias;

  LayerWeights(const Setup& setup, std::mt19937& random, cudaStream_t stream)
      : conv_weight(bytes(setup.channels() * setup.geometry.conv_kernel)),
        conv_bias(bytes(setup.channels())),
        A_log(bytes(setup.geometry.num_heads)),
        D(bytes(setup.geometry.num_heads)),
        dt_bias(bytes(setup.geometry.num_heads)) {
    randomize(conv_weight, random, -0.5f, 0.5f, stream);
    randomize(conv_bias, random, -0.1f, 0.1f, stream);
    randomize(A_log, random, -3.f, 1.f, stream);
    randomize(D, random, -1.f, 1.f, stream);
    randomize(dt_bias, random, -4.f, 0.f, stream);
  }
  static size_t bytes(int64_t floats) { return static_cast<size_t>(floats) * sizeof(float); }
  static void randomize(const Buffer& buffer, std::mt19937& random, float low, float high, cudaStream_t stream) {
    std::vector<float> values(buffer.bytes() / sizeof(float));
    for (float& value : values) value = std::uniform_real_distribution<float>(low, high)(random);
    buffer.put(values, stream);
    wait(stream);
  }
};

replayssm_tensor tensor(const void* data, int32_t dtype, int64_t stride0 = 0, int64_t stride1 = 0) {
  return {const_cast<void*>(data), dtype, {stride0, stride1}};
}

// The slots of all layers and their table.
struct Pool {
  replayssm_layout layout;
  Buffer table_memory;
  std::vector<Buffer> layers;

  explicit Pool(const Setup& setup)
      : layout(layout_of(setup)), table_memory(static_cast<size_t>(replayssm_table_bytes(kSlots, kLayers))) {
    for (int32_t l = 0; l < kLayers; ++l) layers.emplace_back(static_cast<size_t>(kSlots * layout.slot_stride));
  }
  static replayssm_layout layout_of(const Setup& setup) {
    replayssm_layout layout;
    REQUIRE_OP(replayssm_layout_init(&setup.geometry, &setup.config, &layout));
    return layout;
  }
  replayssm_table table() const {
    replayssm_table result;
    REQUIRE_OP(replayssm_table_from_buffer(table_memory.data(), kSlots, kLayers, &result));
    return result;
  }
};

// ---- plugins
// -------------------------------------------------------------------------------------------------------------------

using Creators = std::map<std::string, IPluginCreatorV3One*>;

// Creators as the library exports them, or as a registry hands them out after it loaded the library.
Creators find_creators(const char* library, const char* registry_library, std::string* registry_version) {
  Creators found;
  *registry_version = "none";
  if (!registry_library) {
    for (IPluginCreatorV3One* creator : creators()) found[creator->getPluginName()] = creator;
    return found;
  }
  void* const nvinfer = dlopen(registry_library, RTLD_NOW | RTLD_GLOBAL);
  if (!nvinfer) throw std::runtime_error(dlerror());
  const auto version = [&](const char* name) { return reinterpret_cast<int32_t (*)()>(dlsym(nvinfer, name))(); };
  *registry_version = std::string(registry_library).substr(std::string(registry_library).rfind('/') + 1) + " " +
                      std::to_string(version("getInferLibMajorVersion")) + "." +
                      std::to_string(version("getInferLibMinorVersion"));
  auto* const registry = reinterpret_cast<nvinfer1::IPluginRegistry* (*)()>(dlsym(nvinfer, "getPluginRegistry"))();
  auto find = [&](auto* typed) {
    if (!typed->loadLibrary(library)) throw std::runtime_error(std::string(library) + ": the registry refused it");
    for (const char* name : {"ReplaySsmPlan", "ReplayCausalConv", "ReplaySsmFlush", "ReplaySsmStep"}) {
      found[name] = static_cast<IPluginCreatorV3One*>(typed->getCreator(name, "1", "trtllm_replayssm"));
      if (!found[name]) throw std::runtime_error(std::string(name) + ": not in the registry");
    }
  };
  switch (trtllm_replayssm::abi_of(registry)) {
    case trtllm_replayssm::Abi::kV10:
      find(registry);
      break;
    case trtllm_replayssm::Abi::kV11:
      find(reinterpret_cast<trtllm_replayssm::PluginRegistryV11*>(registry));
      break;
    default:
      throw std::runtime_error("a registry of unknown origin");
  }
  return found;
}

Fields common_fields(const Setup& setup) {
  const replayssm_geometry& g = setup.geometry;
  const replayssm_config& c = setup.config;
  Fields fields;
  fields.set("num_heads", g.num_heads).set("head_dim", g.head_dim).set("num_groups", g.num_groups);
  fields.set("state_dim", g.state_dim).set("conv_kernel", g.conv_kernel);
  fields.set("window", c.window).set("max_step_tokens", c.max_step_tokens);
  fields.set("checkpoint", replayssm_checkpoint_name(c.checkpoint));
  fields.set("read_copy", replayssm_read_copy_name(c.read_copy));
  fields.set("activation", replayssm_dtype_name(c.activation)).set("seed", std::to_string(c.seed).c_str());
  const bool lengths = setup.of_lengths();
  fields.set("num_slots", kSlots).set("state_io", lengths ? "host_pointer" : setup.state_io.c_str());
  fields.set("plan_mode", lengths ? "lengths" : "cursors");
  return fields.set("num_layers", kLayers);
}

// The plugins of a network of mixers: a plan, and conv, flush and step of each layer.
struct Network {
  std::vector<PluginV3> plugins;

  Network(const Setup& setup, const Creators& creators) {
    add(creators.at("ReplaySsmPlan"), common_fields(setup));
    for (int32_t l = 0; l < kLayers; ++l) {
      const Fields fields = common_fields(setup).set("layer", l).set("slot_stride", 0);
      add(creators.at("ReplayCausalConv"), Fields(fields).set("in_offset", static_cast<int32_t>(setup.inner())));
      add(creators.at("ReplaySsmFlush"), Fields(fields).set("first_head", kFirstHead));
      add(creators.at("ReplaySsmStep"), Fields(fields)
                                            .set("first_head", kFirstHead)
                                            .set("dt_offset", static_cast<int32_t>(setup.dt_offset()))
                                            .set("dt_min", 0.f)
                                            .set("dt_max", INFINITY));
    }
  }

  // What an engine holds of them: built, written, read again, and attached to an execution context.
  std::vector<PluginV3> attached() const {
    std::vector<PluginV3> result;
    for (const PluginV3& plugin : plugins)
      result.emplace_back(kDevice == REPLAYSSM_CUDA ? plugin.runtime->attachToContext(nullptr)
                                                    : plugin.plugin->clone());
    return result;
  }

 private:
  void add(IPluginCreatorV3One* creator, const Fields& fields) {
    const PluginV3 built = create(creator, fields.list());
    CHECK(built);
    plugins.emplace_back(
        creator->createPlugin("harness", built.runtime->getFieldsToSerialize(), TensorRTPhase::kRUNTIME));
    CHECK(plugins.back());
  }
};

// ---- a context
// -----------------------------------------------------------------------------------------------------------------

struct Batch {
  int32_t rows, tokens;  // B, S
  std::vector<int32_t> slots, counts, accepted;
};

// One execution context beside the same work by plan, ops and commit, row by row.
class Context {
 public:
  Context(const Setup& setup, const Network& network, uint32_t seed)
      : setup_(setup),
        plugins_(network.attached()),
        random_(seed),
        stream_(make_stream()),
        pool_(setup),
        reference_(setup),
        slots_(kRows * 4),
        tokens_(kRows * 4),
        accepted_(kRows * 4),
        token_ids_(kRows * kMostTokens * 8),
        plan_(static_cast<size_t>(replayssm_plan_bytes(kRows))),
        status_(sizeof(replayssm_error)),
        order_(64),
        stream_id_(8) {
    const auto tensor_bytes = [&](int64_t columns) {
      return static_cast<size_t>(kRows * kMostTokens * columns * setup.element());
    };
    for (int32_t l = 0; l < kLayers; ++l) {
      weights_.emplace_back(setup, random_, stream_);
      projected_.emplace_back(tensor_bytes(setup.projected()));
      xBC_.emplace_back(tensor_bytes(setup.channels()));
      out_.emplace_back(tensor_bytes(setup.inner()));
      expected_.emplace_back(tensor_bytes(setup.inner()));
    }
    reference_xBC_ = std::make_unique<Buffer>(tensor_bytes(setup.channels()));
    for (int32_t s = 0; s < kSlots; ++s) {
      plans_.emplace_back(static_cast<size_t>(replayssm_plan_bytes(1)));
      row_slot_.emplace_back(4);
      row_slot_.back().put(std::vector<int32_t>{s}, stream_);
      row_number_.emplace_back(4);
      wait(stream_);
    }
  }

  ~Context() { release_stream(stream_); }
  Context(const Context&) = delete;

  // Starts a step on the stream; finish() waits and compares.
  void start() {
    batch_ = next_batch();
    upload(batch_);
    execute(batch_);
  }

  void finish() {
    download();
    repeat(batch_);
    compare(batch_);
    ++steps_;
  }

  // Commits what is outstanding, in the context by rows of no tokens, and compares slots and cursors.
  void end() {
    for (int32_t first = 0; first < kSlots; first += kRows) {
      Batch settle{kRows, 1, {}, std::vector<int32_t>(kRows, 0), std::vector<int32_t>(kRows, REPLAYSSM_ACCEPT_ALL)};
      for (int32_t r = 0; r < kRows; ++r) settle.slots.push_back(first + r < kSlots ? first + r : -1);
      upload(settle);
      execute(settle);
      download();
      repeat(settle);
      compare(settle);
    }
    const auto table = pool_.table_memory.get(stream_), expected = reference_.table_memory.get(stream_);
    wait(stream_);
    CHECK(table == expected);
    for (int32_t l = 0; l < kLayers; ++l) {
      const auto slots = pool_.layers[l].get(stream_), wanted = reference_.layers[l].get(stream_);
      wait(stream_);
      CHECK(slots == wanted);
    }
    std::memcpy(counters_.data(), expected.data() + 64, sizeof(counters_));
  }

  // What enqueue refuses leaves slots and cursors as they were (A36); a bad slot makes an idle row and a status.
  void refuse() {
    const auto table = now(pool_.table_memory), slots = now(pool_.layers[0]);
    Batch one{1, 1, {0}, {1}, {REPLAYSSM_ACCEPT_ALL}};
    upload(one);
    wait(stream_);
    for (size_t p = 0; p < plugins_.size(); ++p) {
      for (int32_t fault = 0; fault < 5; ++fault) {
        Node node = node_of(static_cast<int32_t>(p), one);
        const size_t last = node.inputs.size() - 1;
        int64_t nowhere = 0;
        if (fault == 0) node.inputs[0] = nullptr;
        if (fault == 1) node.inputs[last] = nullptr;
        if (fault == 2) node.outputs[0] = nullptr;
        if (fault == 3) node.in[p == 0 ? 3 : 0].dims.d[0] += 7;
        if (fault == 4) {  // state_out elsewhere, or no address
          if (setup_.state_io == "host_pointer") {
            node.inputs[last] = &nowhere;
          } else if (node.returns_memory) {
            node.outputs.back() = order_.data();
          } else {
            continue;
          }
        }
        CHECK(run(static_cast<int32_t>(p), node) != 0);
        CHECK(last_error()[0] != '\0');
      }
    }
    CHECK(now(pool_.table_memory) == table && now(pool_.layers[0]) == slots);

    one.slots = {kSlots};
    upload(one);
    execute(one);
    download();
    replayssm_error error;
    std::memcpy(&error, status_host_.data(), sizeof(error));
    CHECK(error.code == REPLAYSSM_ROW_SLOT_RANGE && error.row == 0 && error.given == kSlots);
    CHECK(now(pool_.layers[0]) == slots);
  }

  int64_t counter(int32_t index) const { return counters_[index]; }

 protected:
  struct Node {
    std::vector<PluginTensorDesc> in, out;
    std::vector<const void*> inputs;
    std::vector<void*> outputs;
    bool returns_memory = false;
  };

  std::vector<char> now(const Buffer& buffer) const {
    std::vector<char> values = buffer.get(stream_);
    wait(stream_);
    return values;
  }

  int32_t below(int32_t limit) { return std::uniform_int_distribution<int32_t>(0, limit - 1)(random_); }

  // Batches have few shapes, so that a captured graph is replayed with other contents.
  Batch next_batch() {
    const int32_t most = setup_.config.max_step_tokens;
    const std::array<std::pair<int32_t, int32_t>, 5> shapes = {
        {{kRows, 1}, {kRows, most}, {3, (most + 1) / 2}, {1, kMostTokens}, {2, most + 3}}};
    const int32_t drawn = below(20);
    const auto [rows, tokens] = shapes[drawn < 9 ? 0 : drawn < 15 ? 1 : drawn < 18 ? 2 : drawn - 15];
    Batch batch{rows, tokens, {}, {}, {}};
    std::array<int32_t, kSlots> order;
    for (int32_t s = 0; s < kSlots; ++s) order[s] = s;
    std::shuffle(order.begin(), order.end(), random_);
    for (int32_t r = 0; r < rows; ++r) {
      const int32_t slot = below(8) == 0 ? -1 : order[r];
      const int32_t count = tokens == 1 ? below(12) > 0 : below(tokens + 1);
      int32_t accepted = 0;
      if (slot >= 0) {
        const bool begins = !used_[slot] || (tokens > most && below(3) == 0);
        accepted = begins ? REPLAYSSM_NEW_SEQUENCE : below(4) == 0 ? REPLAYSSM_ACCEPT_ALL : below(pending_[slot] + 1);
        used_[slot] = true;
        pending_[slot] = tokens > most ? 0 : count;
      }
      batch.slots.push_back(slot), batch.counts.push_back(count), batch.accepted.push_back(accepted);
    }
    return batch;
  }

  void upload(const Batch& batch) {
    slots_.put(batch.slots, stream_), tokens_.put(batch.counts, stream_), accepted_.put(batch.accepted, stream_);
    for (int32_t l = 0; l < kLayers; ++l) {
      const int64_t columns = setup_.projected(), element = setup_.element();
      std::vector<char> values(static_cast<size_t>(int64_t{batch.rows} * batch.tokens * columns * element));
      char* target = values.data();
      for (int32_t r = 0; r < batch.rows; ++r) {
        for (int32_t t = 0; t < batch.tokens; ++t) {
          for (int64_t c = 0; c < columns; ++c, target += element) {
            const float value = static_cast<float>(random_() & 0xffff) / 32768.f - 1.f;
            const bool live = t < batch.counts[r] && batch.slots[r] >= 0 && c >= setup_.inner();
            store(setup_, target, live ? value : NAN);
          }
        }
      }
      projected_[l].put(values, stream_);
      fill(out_[l].data(), 0xEE, out_[l].bytes(), stream_);
      fill(xBC_[l].data(), 0xEE, xBC_[l].bytes(), stream_);
    }
  }

  PluginTensorDesc describe(DataType type, std::initializer_list<int64_t> shape) const {
    PluginTensorDesc desc{};
    desc.dims.nbDims = static_cast<int32_t>(shape.size());
    std::copy(shape.begin(), shape.end(), desc.dims.d);
    desc.type = type;
    desc.format = nvinfer1::TensorFormat::kLINEAR;
    return desc;
  }

  // The tensors of plugin p, in the order of docs/plugins.md.
  Node node_of(int32_t p, const Batch& batch) {
    const int64_t B = batch.rows, S = batch.tokens, D = setup_.channels(), H = setup_.geometry.num_heads;
    const int64_t words = replayssm_plan_bytes(batch.rows) / 4;
    const auto i32 = DataType::kINT32, f32 = DataType::kFLOAT;
    const PluginTensorDesc table = describe(i32, {replayssm_table_bytes(kSlots, kLayers) / 4});
    const bool pointer = setup_.state_io == "host_pointer", alias = setup_.state_io == "alias";
    Node node;
    auto input = [&](const Buffer& buffer, const PluginTensorDesc& desc) {
      node.inputs.push_back(buffer.data()), node.in.push_back(desc);
    };
    auto output = [&](const Buffer& buffer, const PluginTensorDesc& desc) {
      node.outputs.push_back(buffer.data()), node.out.push_back(desc);
    };
    auto memory = [&](const Buffer& buffer, int64_t& address, const PluginTensorDesc& desc, bool returned) {
      address = static_cast<int64_t>(reinterpret_cast<intptr_t>(buffer.data()));
      node.inputs.push_back(pointer ? static_cast<const void*>(&address) : buffer.data());
      node.in.push_back(pointer ? describe(DataType::kINT64, {1}) : desc);
      node.returns_memory = returned && !pointer;
      if (node.returns_memory) output(buffer, desc);
    };
    if (p == 0) {
      for (const Buffer* buffer : {&slots_, &tokens_, &accepted_}) input(*buffer, describe(i32, {B}));
      input(token_ids_, describe(DataType::kINT64, {B, S}));
      output(plan_, describe(i32, {words}));
      output(status_, describe(i32, {8}));
      memory(pool_.table_memory, table_address_, table, true);
      return node;
    }
    const int32_t l = (p - 1) / 3, part = (p - 1) % 3;
    const LayerWeights& weights = weights_[l];
    const PluginTensorDesc state = describe(i32, {kSlots, pool_.layout.slot_stride / 4});
    input(plan_, describe(i32, {words}));
    memory(pool_.table_memory, table_address_, table, false);
    if (part == 0) {
      input(projected_[l], describe(setup_.type(), {B, S, setup_.projected()}));
      input(weights.conv_weight, describe(f32, {D, setup_.geometry.conv_kernel}));
      input(weights.conv_bias, describe(f32, {D}));
      output(xBC_[l], describe(setup_.type(), {B, S, D}));
    } else if (part == 1) {
      input(weights.A_log, describe(f32, {H}));
    } else {
      input(xBC_[l], describe(setup_.type(), {B, S, D}));
      input(projected_[l], describe(setup_.type(), {B, S, setup_.projected()}));
      for (const Buffer* buffer : {&weights.A_log, &weights.D, &weights.dt_bias}) input(*buffer, describe(f32, {H}));
      output(out_[l], describe(setup_.type(), {B, S, setup_.inner()}));
    }
    if (!alias && part > 0) input(order_, describe(i32, {1}));
    if (!alias && part < 2) output(order_, describe(i32, {1}));
    memory(pool_.layers[l], state_address_[l], state, alias || part == 2);
    return node;
  }

  int32_t run(int32_t p, const Node& node) {
    return plugins_[p].runtime->enqueue(node.in.data(), node.out.data(), node.inputs.data(), node.outputs.data(),
                                        nullptr, stream_);
  }

  void launch(const Batch& batch) {
    for (int32_t p = 0; p < static_cast<int32_t>(plugins_.size()); ++p) {
      const Node node = node_of(p, batch);
      CHECK(run(p, node) == 0);
    }
  }

  void execute(const Batch& batch) {
    for (int32_t p = 0; p < static_cast<int32_t>(plugins_.size()); ++p) {
      const Node node = node_of(p, batch);
      CHECK(plugins_[p].runtime->onShapeChange(node.in.data(), static_cast<int32_t>(node.in.size()), node.out.data(),
                                               static_cast<int32_t>(node.out.size())) == 0);
    }
#ifdef REPLAYSSM_HARNESS_CUDA
    if (setup_.captured) {
      const std::pair<int32_t, int32_t> shape{batch.rows, batch.tokens};
      auto known = graphs_.find(shape);
      if (known == graphs_.end()) known = graphs_.emplace(shape, Graph(stream_, [&] { launch(batch); })).first;
      known->second.launch(stream_);
      return;
    }
#endif
    launch(batch);
  }

  void download() {
    out_host_.clear();
    for (const Buffer& out : out_) out_host_.push_back(out.get(stream_));
    status_host_ = status_.get(stream_);
    wait(stream_);
  }

  // The batch again, a row at a time, with a plan and a commit of its own.
  void repeat(const Batch& batch) {
    const replayssm_exec exec = {kDevice, stream_};
    const replayssm_table table = reference_.table();
    for (int32_t r = 0; r < batch.rows; ++r) {
      const int32_t slot = batch.slots[r], count = batch.counts[r];
      if (slot < 0) continue;
      const auto* device_slot = static_cast<const int32_t*>(row_slot_[slot].data());
      void* const plan = plans_[slot].data();
      const bool folded = batch.tokens > setup_.config.max_step_tokens;
      if (batch.accepted[r] == REPLAYSSM_NEW_SEQUENCE) {
        REQUIRE_OP(replayssm_reset(&exec, &table, device_slot, static_cast<const int64_t*>(stream_id_.data()), 1));
      } else if (outstanding_[slot] >= 0) {
        const int32_t accepted = batch.accepted[r] == REPLAYSSM_ACCEPT_ALL ? outstanding_[slot] : batch.accepted[r];
        row_number_[slot].put(std::vector<int32_t>{accepted}, stream_);
        const auto* number = static_cast<const int32_t*>(row_number_[slot].data());
        REQUIRE_OP(replayssm_commit(&exec, &table, plan, 1, number, REPLAYSSM_STEPPED));
      }
      outstanding_[slot] = -1;
      REQUIRE_OP(replayssm_plan(&exec, &setup_.geometry, &setup_.config, &table, device_slot, nullptr, count, 1, plan));
      const int64_t first = int64_t{r} * batch.tokens;
      for (int32_t l = 0; l < kLayers; ++l) repeat_layer(exec, table, plan, l, first, count, folded);
      if (folded || count == 0) {
        REQUIRE_OP(replayssm_commit(&exec, &table, plan, 1, nullptr, folded ? REPLAYSSM_FOLDED : REPLAYSSM_STEPPED));
      } else {
        outstanding_[slot] = count;
      }
    }
  }

  // The tokens first..first+count-1 of a row through layer l of the reference.
  void repeat_layer(const replayssm_exec& exec, const replayssm_table& table, const void* plan, int32_t l,
                    int64_t first, int32_t count, bool folded) {
    const auto& [H, P, G, N, K] = setup_.geometry;
    const int64_t D = setup_.channels(), inner = setup_.inner(), size = setup_.element();
    const int32_t type = setup_.config.activation;
    const LayerWeights& weights = weights_[l];
    replayssm_layer layer;
    REQUIRE_OP(replayssm_layer_from_blob(&reference_.layout, reference_.layers[l].data(), l, &layer));
    layer.first_head = kFirstHead;
    const char* in = projected_[l].at(first * setup_.projected() * size);
    const replayssm_conv_args conv = {tensor(in + inner * size, type, setup_.projected(), 1),
                                      tensor(weights.conv_weight.data(), REPLAYSSM_FP32),
                                      tensor(weights.conv_bias.data(), REPLAYSSM_FP32),
                                      tensor(reference_xBC_->data(), type, D, 1),
                                      count,
                                      count,
                                      /*records=*/0};
    REQUIRE_OP(replayssm_conv_step(&exec, &setup_.geometry, &setup_.config, &layer, &table, plan, 1, &conv));
    const char* xBC = reference_xBC_->at(0);
    const replayssm_scan_args scan = {tensor(xBC, type, D, P),
                                      tensor(xBC + inner * size, type, D, N),
                                      tensor(xBC + (inner + int64_t{G} * N) * size, type, D, N),
                                      tensor(in + setup_.dt_offset() * size, type, setup_.projected(), 1),
                                      tensor(weights.A_log.data(), REPLAYSSM_FP32),
                                      tensor(weights.D.data(), REPLAYSSM_FP32),
                                      tensor(weights.dt_bias.data(), REPLAYSSM_FP32),
                                      tensor(expected_[l].at(first * inner * size), type, inner, P),
                                      0.f,
                                      INFINITY,
                                      count,
                                      count};
    if (folded) {
      REQUIRE_OP(replayssm_prefill(&exec, &setup_.geometry, &setup_.config, &layer, &table, plan, 1, &scan));
    } else {
      REQUIRE_OP(replayssm_step(&exec, &setup_.geometry, &setup_.config, &layer, &table, plan, 1, &scan, 0));
    }
  }

  // x and B of a step's tokens are in the rings: their columns of xBC [tokens, D] are as they were.
  void require_records(int64_t tokens) const {
    const int64_t row = setup_.channels() * setup_.element();
    const int64_t untouched = row - int64_t{setup_.geometry.num_groups} * setup_.geometry.state_dim * setup_.element();
    std::vector<std::vector<char>> layers;
    for (const Buffer& xBC : xBC_) layers.push_back(xBC.get(stream_, static_cast<size_t>(tokens * row)));
    wait(stream_);
    for (const std::vector<char>& given : layers) {
      for (const char* at = given.data(); at < given.data() + tokens * row; at += row)
        CHECK(std::all_of(at, at + untouched, [](char byte) { return byte == static_cast<char>(0xEE); }));
    }
  }

  void compare(const Batch& batch) {
    CHECK(std::all_of(status_host_.begin(), status_host_.end(), [](char byte) { return byte == 0; }));
    if (batch.tokens <= setup_.config.max_step_tokens) require_records(int64_t{batch.rows} * batch.tokens);
    const int64_t row_bytes = setup_.inner() * setup_.element();
    std::vector<std::vector<char>> wanted;
    for (const Buffer& expected : expected_) wanted.push_back(expected.get(stream_));
    wait(stream_);
    for (int32_t l = 0; l < kLayers; ++l) {
      const std::vector<char>& expected = wanted[l];
      const char* given = out_host_[l].data();
      for (int32_t r = 0; r < batch.rows; ++r) {
        const int64_t live = batch.slots[r] < 0 ? 0 : batch.counts[r], start = int64_t{r} * batch.tokens * row_bytes;
        CHECK(std::memcmp(given + start, expected.data() + start, static_cast<size_t>(live * row_bytes)) == 0);
        CHECK(std::all_of(given + start + live * row_bytes, given + start + batch.tokens * row_bytes,
                          [](char byte) { return byte == static_cast<char>(0xEE); }));
      }
    }
  }

  const Setup& setup_;
  std::vector<PluginV3> plugins_;
  std::mt19937 random_;
  cudaStream_t stream_;
  Pool pool_, reference_;
  Buffer slots_, tokens_, accepted_, token_ids_, plan_, status_, order_;
  Buffer stream_id_;  // 0, the stream of a sequence that begins inside a graph
  std::vector<LayerWeights> weights_;
  std::vector<Buffer> projected_, xBC_, out_, expected_, plans_, row_slot_, row_number_;
  std::unique_ptr<Buffer> reference_xBC_;
  std::array<int64_t, kLayers> state_address_{};
  int64_t table_address_ = 0;
  std::array<bool, kSlots> used_{};
  std::array<int32_t, kSlots> pending_{};
  std::array<int32_t, kSlots> outstanding_ = filled();
  std::array<int64_t, REPLAYSSM_NUM_COUNTERS> counters_{};
  std::vector<std::vector<char>> out_host_;
  std::vector<char> status_host_;
  Batch batch_{};
  int64_t steps_ = 0;
#ifdef REPLAYSSM_HARNESS_CUDA
  std::map<std::pair<int32_t, int32_t>, Graph> graphs_;
#endif

  static std::array<int32_t, kSlots> filled() {
    std::array<int32_t, kSlots> result;
    result.fill(-1);
    return result;
  }
};

// A context whose plans are of lengths, as TensorRT-LLM's runtime binds them.
class LengthsContext : public Context {
 public:
  LengthsContext(const Setup& setup, const Network& network, uint32_t seed)
      : Context(setup, network, seed), prompts_(kRows * 4), sequences_(kRows * 4), ends_(kRows * 4), table_head_(128) {
    for (const Pool* pool : {&pool_, &reference_}) {
      for (const Buffer& layer : pool->layers) fill(layer.data(), 0xFF, layer.bytes(), stream_);
    }
    wait(stream_);
  }

  void start() {
    draw();
    slots_.put(now_.slots, stream_), prompts_.put(host_prompts_, stream_), sequences_.put(sequence_lengths_, stream_);
    ends_.put(token_ends_, stream_);
    for (int32_t l = 0; l < kLayers; ++l) {
      const int64_t columns = setup_.projected(), element = setup_.element();
      std::vector<char> values(static_cast<size_t>(now_.tokens * columns * element));
      for (int64_t i = 0; i < now_.tokens * columns; ++i) {
        const float value = static_cast<float>(random_() & 0xffff) / 32768.f - 1.f;
        store(setup_, values.data() + i * element, i % columns >= setup_.inner() ? value : NAN);
      }
      projected_[l].put(values, stream_);
      fill(out_[l].data(), 0xEE, out_[l].bytes(), stream_);
      fill(xBC_[l].data(), 0xEE, xBC_[l].bytes(), stream_);
    }
    for (int32_t p = 0; p < static_cast<int32_t>(plugins_.size()); ++p) {
      const Node node = node_of(p);
      CHECK(plugins_[p].runtime->onShapeChange(node.in.data(), static_cast<int32_t>(node.in.size()), node.out.data(),
                                               static_cast<int32_t>(node.out.size())) == 0);
    }
#ifdef REPLAYSSM_HARNESS_CUDA
    if (setup_.captured && !begins_) {  // what the host decides is the same in every graph of decode steps
      auto known = graphs_.find({now_.rows, 1});
      if (known == graphs_.end())
        known = graphs_.emplace(std::pair<int32_t, int32_t>{now_.rows, 1}, Graph(stream_, [&] { launch(); })).first;
      known->second.launch(stream_);
      return;
    }
#endif
    launch();
  }

  void finish() {
    out_host_.clear();
    for (const Buffer& out : out_) out_host_.push_back(out.get(stream_));
    const std::vector<char> table = table_head_.get(stream_);
    wait(stream_);
    CHECK(std::all_of(table.begin(), table.begin() + sizeof(replayssm_error), [](char byte) { return byte == 0; }));
    if (!begins_) require_records(now_.tokens);
    const replayssm_exec exec = {kDevice, stream_};
    const replayssm_table reference = reference_.table();
    int64_t first = 0;
    for (int32_t r = 0; r < now_.rows; ++r) {
      const int32_t slot = now_.slots[r], count = now_.counts[r];
      const auto* device_slot = static_cast<const int32_t*>(row_slot_[slot].data());
      void* const plan = plans_[slot].data();
      if (begins_)
        REQUIRE_OP(replayssm_reset(&exec, &reference, device_slot, static_cast<const int64_t*>(stream_id_.data()), 1));
      REQUIRE_OP(
          replayssm_plan(&exec, &setup_.geometry, &setup_.config, &reference, device_slot, nullptr, count, 1, plan));
      for (int32_t l = 0; l < kLayers; ++l) repeat_layer(exec, reference, plan, l, first, count, begins_);
      REQUIRE_OP(replayssm_commit(&exec, &reference, plan, 1, nullptr, begins_ ? REPLAYSSM_FOLDED : REPLAYSSM_STEPPED));
      first += count;
    }
    const auto bytes = static_cast<size_t>(now_.tokens * setup_.inner() * setup_.element());
    for (int32_t l = 0; l < kLayers; ++l) {
      const std::vector<char> expected = expected_[l].get(stream_);
      wait(stream_);
      const std::vector<char>& given = out_host_[l];
      CHECK(std::memcmp(given.data(), expected.data(), bytes) == 0);
      CHECK(std::all_of(given.begin() + static_cast<int64_t>(bytes), given.end(),
                        [](char byte) { return byte == static_cast<char>(0xEE); }));
    }
  }

  void end() {
    for (int32_t l = 0; l < kLayers; ++l) {
      const auto slots = pool_.layers[l].get(stream_), wanted = reference_.layers[l].get(stream_);
      wait(stream_);
      CHECK(slots == wanted);
    }
    const auto table = reference_.table_memory.get(stream_);
    wait(stream_);
    std::memcpy(counters_.data(), table.data() + 64, sizeof(counters_));
  }

  // Prompts and decode steps in one batch are refused by whoever looks at the types.
  void refuse() {
    now_ = {2, 2, {0, 1}, {1, 1}, {}};
    host_types_ = {0, 1};
    for (int32_t p = 0; p < static_cast<int32_t>(plugins_.size()); ++p) {
      if (p % 3 == 2) continue;  // flush, which does not look
      CHECK(run(p, node_of(p)) != 0);
      CHECK(std::strstr(last_error(), "host_request_types: expected 0 (context) in all rows or 1 (generation) in all"));
    }
  }

 private:
  void draw() {
    std::array<int32_t, kSlots> order;
    for (int32_t s = 0; s < kSlots; ++s) order[s] = s;
    std::shuffle(order.begin(), order.end(), random_);
    std::vector<int32_t> live;
    for (const int32_t slot : order) {
      if (prompt_[slot] > 0) live.push_back(slot);
    }
    begins_ = live.empty() || below(30) == 0;
    const int32_t rows = 1 + below(begins_ ? 3 : std::min<int32_t>(kRows, static_cast<int32_t>(live.size())));
    now_ = {rows, 0, {}, {}, {}};
    host_types_.assign(static_cast<size_t>(rows), begins_ ? 0 : 1);
    host_prompts_.clear(), sequence_lengths_.clear(), token_ends_.clear();
    for (int32_t r = 0; r < rows; ++r) {
      const int32_t slot = begins_ ? order[r] : live[static_cast<size_t>(r)];
      if (begins_) prompt_[slot] = 1 + below(kMostTokens), decoded_[slot] = 0;
      const int32_t count = begins_ ? prompt_[slot] : 1;
      now_.slots.push_back(slot), now_.counts.push_back(count);
      now_.tokens += count;
      host_prompts_.push_back(prompt_[slot]), token_ends_.push_back(now_.tokens);
      sequence_lengths_.push_back(prompt_[slot] + (begins_ ? 0 : ++decoded_[slot]));
    }
  }

  void launch() {
    for (int32_t p = 0; p < static_cast<int32_t>(plugins_.size()); ++p) CHECK(run(p, node_of(p)) == 0);
  }

  Node node_of(int32_t p) {
    const int64_t B = now_.rows, T = now_.tokens, D = setup_.channels(), H = setup_.geometry.num_heads;
    const auto i32 = DataType::kINT32, f32 = DataType::kFLOAT;
    const PluginTensorDesc rows = describe(i32, {B}), order = describe(i32, {1}), head = describe(i32, {32});
    const PluginTensorDesc plan = describe(i32, {replayssm_plan_bytes(now_.rows) / 4});
    Node node;
    auto input = [&](const void* data, const PluginTensorDesc& desc) {
      node.inputs.push_back(data), node.in.push_back(desc);
    };
    auto output = [&](const Buffer& buffer, const PluginTensorDesc& desc) {
      node.outputs.push_back(buffer.data()), node.out.push_back(desc);
    };
    if (p == 0) {
      for (const void* data : {static_cast<const void*>(slots_.data()), static_cast<const void*>(host_types_.data()),
                               static_cast<const void*>(prompts_.data()), static_cast<const void*>(sequences_.data()),
                               static_cast<const void*>(ends_.data())})
        input(data, rows);
      output(plan_, plan), output(table_head_, head);
      return node;
    }
    const int32_t l = (p - 1) / 3, part = (p - 1) % 3;
    const LayerWeights& weights = weights_[l];
    const PluginTensorDesc projected = describe(setup_.type(), {T, setup_.projected()});
    input(plan_.data(), plan), input(table_head_.data(), head);
    if (part == 0) {
      input(projected_[l].data(), projected);
      input(weights.conv_weight.data(), describe(f32, {D, setup_.geometry.conv_kernel}));
      input(weights.conv_bias.data(), describe(f32, {D}));
      output(xBC_[l], describe(setup_.type(), {T, D}));
    } else if (part == 1) {
      input(weights.A_log.data(), describe(f32, {H}));
    } else {
      input(xBC_[l].data(), describe(setup_.type(), {T, D})), input(projected_[l].data(), projected);
      for (const Buffer* buffer : {&weights.A_log, &weights.D, &weights.dt_bias})
        input(buffer->data(), describe(f32, {H}));
      output(out_[l], describe(setup_.type(), {T, setup_.inner()}));
    }
    if (part != 1) input(host_types_.data(), rows), input(host_prompts_.data(), rows);
    if (part > 0) input(order_.data(), order);
    if (part < 2) output(order_, order);
    state_address_[l] = static_cast<int64_t>(reinterpret_cast<intptr_t>(pool_.layers[l].data()));
    input(&state_address_[l], describe(DataType::kINT64, {1}));
    return node;
  }

  Buffer prompts_, sequences_, ends_, table_head_;
  Batch now_{};
  bool begins_ = false;
  std::vector<int32_t> host_types_, host_prompts_, sequence_lengths_, token_ends_;
  std::array<int32_t, kSlots> prompt_{}, decoded_{};  // of the sequence in a slot; prompt 0: none
};

// Runs a setup in contexts of its kind and returns its line of the result.
template <typename Kind>
std::string run(const Setup& setup, const Creators& creators) {
  const Network network(setup, creators);
  Kind first(setup, network, 1), second(setup, network, 2);
  for (int32_t i = 0; i < setup.steps; ++i) {
    first.start(), second.start();
    first.finish(), second.finish();
  }
  int64_t tokens = 0, flushes = 0;
  for (Kind* context : {&first, &second}) {
    context->end();
    tokens += context->counter(REPLAYSSM_COUNT_TOKENS);
    flushes += context->counter(REPLAYSSM_COUNT_FLUSHES);
  }
  CHECK(flushes > 0);
  first.refuse();
  const replayssm_geometry& g = setup.geometry;
  std::ostringstream line;
  line << "{\"heads\": " << g.num_heads << ", \"head_dim\": " << g.head_dim << ", \"groups\": " << g.num_groups
       << ", \"state_dim\": " << g.state_dim << ", \"window\": " << setup.config.window
       << ", \"step_tokens\": " << setup.config.max_step_tokens << ", \"checkpoint\": \""
       << replayssm_checkpoint_name(setup.config.checkpoint) << "\", \"read_copy\": \""
       << replayssm_read_copy_name(setup.config.read_copy) << "\", \"activation\": \""
       << replayssm_dtype_name(setup.config.activation) << "\", \"state_io\": \"" << setup.state_io
       << "\", \"mode\": \"" << (setup.captured ? "captured" : "eager")
       << "\", \"contexts\": 2, \"steps_each\": " << setup.steps << ", \"tokens\": " << tokens
       << ", \"flushes\": " << flushes << ", \"same_bits\": true}";
  return line.str();
}

// One format in every way (of passing state; eagerly and captured) for all steps. Then every pair of formats, in one
// way in turn for all steps and in every other for a few, or, `quick`, in that one for a few; in both geometries that
// have kernels of their own and one that has none.
std::vector<Setup> setups(int32_t steps, bool quick) {
  static const char* const kStateIos[] = {"alias", "same_pointer", "host_pointer", "lengths"};
  std::vector<Setup> result;
  int32_t pairs = 0;
  const replayssm_geometry tuned64 = {8, 64, 2, 128, 4}, tuned80 = {6, 80, 2, 128, 4}, other = {4, 16, 2, 64, 3};
  auto add = [&](const replayssm_geometry& geometry, int32_t checkpoint, int32_t read_copy, int32_t activation) {
    // The CUDA steps of 16-bit checkpoints without a copy have a kernel for windows of four steps and more.
    const bool plain = checkpoint != REPLAYSSM_CHECKPOINT_FP32 && read_copy == REPLAYSSM_READ_COPY_NONE;
    const replayssm_config config = {plain ? 8 : 12, plain ? 2 : 4, checkpoint, read_copy, activation, 77};
    replayssm_layout layout;
    if (replayssm_layout_init(&geometry, &config, &layout) != REPLAYSSM_OK) return;  // a pair that makes no sense
    for (int32_t way = 0; way < 4; ++way) {
      for (const bool captured : {false, true}) {
        if (captured && kDevice == REPLAYSSM_HOST) continue;
        const bool in_turn = way == pairs % 4 && (kDevice == REPLAYSSM_HOST || captured == (pairs / 4 % 2 == 1));
        if (quick && pairs > 0 && !in_turn) continue;
        const bool all = pairs == 0 || (in_turn && !quick);
        result.push_back({geometry, config, kStateIos[way], captured, all ? steps : way == 3 ? kFewLengths : kFew});
      }
    }
    ++pairs;
  };
  add(tuned64, REPLAYSSM_CHECKPOINT_FP32, REPLAYSSM_READ_COPY_NONE, REPLAYSSM_BF16);
  for (int32_t checkpoint = 0; replayssm_checkpoint_name(checkpoint); ++checkpoint) {
    for (int32_t read_copy = 0; replayssm_read_copy_name(read_copy); ++read_copy) {
      for (const int32_t activation : {REPLAYSSM_BF16, REPLAYSSM_FP16, REPLAYSSM_FP32}) {
        if (activation == REPLAYSSM_FP32 && checkpoint != REPLAYSSM_CHECKPOINT_FP32) continue;
        add(activation == REPLAYSSM_FP16   ? tuned80
            : activation == REPLAYSSM_BF16 ? tuned64
                                           : other,
            checkpoint, read_copy, activation);
      }
    }
  }
  return result;
}

}  // namespace

int main(int argc, char** argv) {
  const char *library = nullptr, *registry = nullptr, *output = nullptr, *commit = "unknown",
             *command = "plugin_harness";
  int32_t steps = 1000, part = 0, parts = 1, threads = 1;
  bool quick = false;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--quick") {
      quick = true;
    } else if (argument.rfind("--", 0) == 0 && i + 1 < argc) {
      const char* value = argv[++i];
      if (argument == "--registry") registry = value;
      if (argument == "--output") output = value;
      if (argument == "--commit") commit = value;
      if (argument == "--command") command = value;
      if (argument == "--steps") steps = std::atoi(value);
      if (argument == "--threads") threads = std::atoi(value);
      if (argument == "--part" && std::sscanf(value, "%d/%d", &part, &parts) != 2) parts = 0;
    } else {
      library = argv[i];
    }
  }
  if (!library || steps < kFewLengths || part < 0 || part >= parts || threads < 1) {
    std::printf(
        "usage: %s LIBRARY [--registry LIBNVINFER] [--steps N, at least 32] [--quick]\n"
        "       [--part I/N, every Nth case from I on] [--threads N, so many cases at a time]\n"
        "       [--output FILE, a record with --commit ID and --command TEXT]\n",
        argv[0]);
    return 2;
  }
  if (!std::freopen("/dev/null", "w", stderr)) return 2;  // what enqueue refuses by intent
  std::setvbuf(stdout, nullptr, _IOLBF, 0);               // a run that is stopped has told of its finished cases
  try {
    plugin_library::open(library);
    std::string registry_version;
    const Creators creators = find_creators(library, registry, &registry_version);
    std::ostringstream text;
    char date[16];
    const std::time_t now = std::time(nullptr);
    std::strftime(date, sizeof(date), "%Y-%m-%d", std::gmtime(&now));
    text << "{\n \"bench\": \"plugin-harness\",\n \"gpu\": \"" << device_name() << "\",\n \"date\": \"" << date
         << "\",\n \"commit\": \"" << commit << "\",\n \"registry\": \"" << registry_version << "\",\n \"command\": \""
         << command << "\",\n \"cases\": [";
    const std::vector<Setup> all = setups(steps, quick);
    std::vector<std::string> lines;
    for (size_t i = part; i < all.size(); i += parts) lines.emplace_back();
    std::atomic<size_t> next{0};
    const auto work = [&] {
      try {
        for (size_t i; (i = next++) < lines.size();) {
          const Setup& setup = all[part + i * parts];
          lines[i] = setup.of_lengths() ? run<LengthsContext>(setup, creators) : run<Context>(setup, creators);
          std::printf("%s\n", lines[i].c_str());
        }
      } catch (const std::exception& e) {
        std::printf("plugin_harness: %s\n", e.what());
        std::_Exit(1);
      }
    };
    std::vector<std::thread> workers;
    for (int32_t t = 1; t < threads; ++t) workers.emplace_back(work);
    work();
    for (std::thread& worker : workers) worker.join();
    for (size_t i = 0; i < lines.size(); ++i) text << (i ? ",\n  " : "\n  ") << lines[i];
    text << "\n ]\n}\n";
    if (output) {
      const std::string unfinished = std::string(output) + ".part";
      std::ofstream(unfinished) << text.str();
      CHECK(std::rename(unfinished.c_str(), output) == 0);
    }
    std::printf("plugin_harness: %zu of %zu cases, all the same bits\n", lines.size(), all.size());
  } catch (const std::exception& e) {
    std::printf("plugin_harness: %s\n", e.what());
    return 1;
  }
  return 0;
}
