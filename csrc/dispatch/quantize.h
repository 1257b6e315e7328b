#pragma once
// Quantization on either side: of one matrix, of a stack of them, of a matrix in groups of rows.

#include "common/args/grouped_values.h"
#include "dispatch/target.h"

namespace zerofp4 {

// Of `experts` matrices (matrix_of); args are those of the first.
void tensor_amax(const Target& target, const AmaxArgs& args, int64_t experts = 1);
void quantize(const Target& target, const QuantizeArgs& args, int64_t experts = 1);

void grouped_amax(const Target& target, const GroupedAmaxArgs& args);
void quantize_grouped(const Target& target, const GroupedArgs& args);
void grouped_values(const Target& target, const GroupedValuesArgs& args);

}  // namespace zerofp4
