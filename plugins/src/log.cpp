// SPDX-License-Identifier: Apache-2.0
#include "log.h"

#include <atomic>
#include <cstdio>

#include "tensorrt_abi.h"

namespace trtllm_replayssm {
namespace {

constexpr auto kError = nvinfer1::ILogger::Severity::kERROR;

struct Finder {
  nvinfer1::ILoggerFinder* finder;
  Abi abi;
};

// Set when a registry loads the library, read by any thread. Old ones are never freed: there are as many as registries.
std::atomic<const Finder*> current{nullptr};

template <typename FinderType>
bool log_through(FinderType* finder, const char* text) {
  auto* const logger = finder->findLogger();
  if (logger) logger->log(kError, text);
  return logger != nullptr;
}

bool log_to_tensorrt(const char* text) {
  const Finder* known = current.load();
  if (!known || known->abi == Abi::kUnknown) return false;
  return known->abi == Abi::kV10 ? log_through(known->finder, text)
                                 : log_through(reinterpret_cast<LoggerFinderV11*>(known->finder), text);
}

thread_local std::string error;

}  // namespace

void set_logger_finder(nvinfer1::ILoggerFinder* finder) noexcept {
  try {
    current.store(finder ? new Finder{finder, abi_of(finder)} : nullptr);
  } catch (...) {  // out of memory: stderr will do
  }
}

void log_error(const std::string& text) noexcept {
  try {
    error = text;
    if (log_to_tensorrt(text.c_str())) return;
  } catch (...) {  // of a logger that the application wrote, or out of memory
  }
  std::fprintf(stderr, "[trtllm_replayssm] %s\n", text.c_str());
}

const char* last_error() noexcept { return error.c_str(); }

}  // namespace trtllm_replayssm
