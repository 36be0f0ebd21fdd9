#include "trace.h"

#include <atomic>
#include <mutex>
#include <vector>

namespace hfb {
namespace {

std::mutex log_mutex;
std::vector<std::string> call_log;
int num_recording = 0;
std::atomic<bool> is_recording{false};  // the only thing a call looks at when nobody records

class JsonObject {
 public:
  void add(const char* key, const std::string& value) { add_raw(key, "\"" + escape(value) + "\""); }
  void add(const char* key, int64_t value) { add_raw(key, std::to_string(value)); }
  void add_flag(const char* key, bool value) { add_raw(key, value ? "true" : "false"); }
  std::string text() const { return "{" + body_ + "}"; }

 private:
  void add_raw(const char* key, const std::string& value) {
    body_ += (body_.empty() ? "\"" : ", \"") + std::string(key) + "\": " + value;
  }
  static std::string escape(const std::string& text) {
    std::string escaped;
    for (char c : text) {
      if (c == '"' || c == '\\') escaped += '\\';
      escaped += c;
    }
    return escaped;
  }
  std::string body_;
};

}  // namespace

std::string describe_call(Direction direction, const ForwardParams& p, const Plan& plan,
                          const std::string& device) {
  JsonObject call;
  call.add("op", direction == Direction::kForward ? "forward" : "backward");
  call.add("kernel", std::string(kernel_name(plan.kernel)));
  call.add("device", device);
  call.add("dtype", std::string(dtype_name(p.dtype)));
  call.add("B", p.batch);
  call.add("Hq", p.heads_q);
  call.add("Hkv", p.heads_kv);
  call.add("Lq", p.len_q);
  call.add("Lk", p.len_kv);
  call.add("D", p.head_dim);
  call.add("Dv", p.head_dim_v);
  call.add("features", feature_list(p));
  call.add("block_m", plan.tile.block_m);
  call.add("block_n", plan.tile.block_n);
  call.add("compiled_head_dim", plan.compiled_head_dim);
  call.add("smem_bytes", plan.tile.smem_bytes);
  call.add("workspace_bytes", plan.workspace_bytes);
  call.add("num_blocks", plan.num_blocks);
  call.add("reason", plan.reason);
  return call.text();
}

int64_t trace_start() {
  const std::lock_guard<std::mutex> lock(log_mutex);
  ++num_recording;
  is_recording = true;
  return static_cast<int64_t>(call_log.size());
}

std::string trace_read(int64_t begin) {
  const std::lock_guard<std::mutex> lock(log_mutex);
  std::string array = "[";
  for (size_t i = static_cast<size_t>(begin < 0 ? 0 : begin); i < call_log.size(); ++i) {
    array += (array.size() > 1 ? ", " : "") + call_log[i];
  }
  return array + "]";
}

void trace_stop() {
  const std::lock_guard<std::mutex> lock(log_mutex);
  if (num_recording > 0 && --num_recording == 0) {
    is_recording = false;
    call_log.clear();
  }
}

void trace_call(Direction direction, const ForwardParams& params, const Plan& plan,
                int device_index) {
  if (!is_recording.load(std::memory_order_relaxed)) return;
  const std::string device =
      plan.kernel == Kernel::kCpu ? "cpu" : "cuda:" + std::to_string(device_index);
  std::string line = describe_call(direction, params, plan, device);
  const std::lock_guard<std::mutex> lock(log_mutex);
  if (num_recording > 0) call_log.push_back(std::move(line));
}

}  // namespace hfb
