#pragma once
// Sharing out the units of a list of tensors between OpenMP threads.
//
// These files are compiled once per instruction set and linked together, so everything here lives in a
// namespace named after it: a template with one name for all of them could be linked from the AVX-512 objects
// into baseline code. For the same reason the operations use nothing inline from the standard library.

#include <omp.h>

#include "common/bits.h"
#include "cpu/device/float_mode.h"

#ifndef ZEROFP4_ISA
#error "compile with -DZEROFP4_ISA=baseline, avx2 or avx512"
#endif

namespace zerofp4::cpu::ZEROFP4_ISA {

ZEROFP4_HD int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
ZEROFP4_HD uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

// Calls body(begin, end) on equal consecutive shares of [0, units), each of at least `grain` units: waking a
// thread for less costs more than it saves.
template <class Body>
void parallel_shares(int64_t units, int threads, int64_t grain, const Body& body) {
    const int64_t shares = least(threads, units / grain);
    if (shares <= 1) {
        if (units > 0) body(int64_t{0}, units);
        return;
    }
#pragma omp parallel num_threads(static_cast<int>(shares))
    {
        const FloatMode mode;
        const int64_t team = omp_get_num_threads(), mine = omp_get_thread_num();
        body(units * mine / team, units * (mine + 1) / team);
    }
}

// The last item whose first unit is at or before `unit`: the one that holds it, as empty items come before.
template <class Item, class Base>
int64_t find_item(const Item* items, int64_t count, int64_t Base::* first_unit, int64_t unit) {
    int64_t low = 0, high = count;
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        (items[middle].*first_unit <= unit ? low : high) = middle;
    }
    return low;
}

// Shares out the units of `count` items and calls body(item, begin, end) with the item's own unit numbers,
// for every item that a share touches; `first_unit` may be a member of a base of Item. Many small items and
// one large one both keep all threads busy. Those before `begin` are left out.
template <class Item, class Base, class Body>
void parallel_items(const Item* items, int64_t count, int64_t Base::* first_unit, int64_t units, int threads,
                    int64_t grain, const Body& body, int64_t begin = 0) {
    parallel_shares(units - begin, threads, grain, [&](int64_t unit, int64_t end) {
        unit += begin, end += begin;
        for (int64_t i = find_item(items, count, first_unit, unit); unit < end; ++i) {
            const int64_t next = i + 1 < count ? items[i + 1].*first_unit : units;
            const int64_t stop = least(next, end);
            if (unit < stop) body(items[i], unit - items[i].*first_unit, stop - items[i].*first_unit);
            unit = stop;
        }
    });
}

}  // namespace zerofp4::cpu::ZEROFP4_ISA
