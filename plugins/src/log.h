// SPDX-License-Identifier: Apache-2.0
//
// Where refusals go: TensorRT's logger if this library was given one, else stderr; and always into last_error().
#pragma once

#include <string>

namespace nvinfer1 {
class ILoggerFinder;
}

namespace trtllm_replayssm {

void set_logger_finder(nvinfer1::ILoggerFinder* finder) noexcept;

void log_error(const std::string& text) noexcept;

// The last text logged by this thread; "" if none.
const char* last_error() noexcept;

}  // namespace trtllm_replayssm
