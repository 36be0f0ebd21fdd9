// Counts the calls that really ran, inside the library, so that compiled graphs are seen too.
// Thread-safe.
#pragma once

#include <string>

#include "plan.h"

namespace hfb {

// Starts recording (nestable) and returns the index at which the caller's records begin.
int64_t trace_start();
// Records from index on, as a JSON array.
std::string trace_read(int64_t begin);
// Ends one trace_start(); the last one clears the log.
void trace_stop();
// Adds one call if anybody records.
void trace_call(Direction direction, const ForwardParams& params, const Plan& plan,
                int device_index);

// Plan and problem as one JSON object, shared by trace() and explain().
std::string describe_call(Direction direction, const ForwardParams& params, const Plan& plan,
                          const std::string& device);

}  // namespace hfb
