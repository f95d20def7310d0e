// Which states are kept for a slot's earlier lengths, within a bound of bytes.
#include "check.h"
#include "engine/state_checkpoints.h"

using dspine::StateCheckpoints;

namespace {

std::string state(size_t n) {
    return std::string(n, 'x');
}

}  // namespace

TEST(the_longest_up_to_a_length) {
    StateCheckpoints all(1000);
    CHECK_EQ(all.longest(0, 100), 0);
    for (const int32_t n : {10, 30, 20}) {
        all.add(0, n, state(1));
    }
    all.add(1, 25, state(1));
    CHECK_EQ(all.longest(0, 9), 0);
    CHECK_EQ(all.longest(0, 10), 10);
    CHECK_EQ(all.longest(0, 29), 20);
    CHECK_EQ(all.longest(0, 100), 30);
    CHECK_EQ(all.longest(1, 100), 25);
    CHECK_THROWS(std::invalid_argument, "no checkpoint of slot 1 at 10", all.use(1, 10));
}

TEST(cutting_drops_longer_ones_of_the_slot) {
    StateCheckpoints all(1000);
    for (const int32_t n : {10, 20, 30}) {
        all.add(0, n, state(5));
        all.add(1, n, state(7));
    }
    all.cut(0, 20);
    CHECK_EQ(all.longest(0, 100), 20);
    CHECK_EQ(all.longest(1, 100), 30);
    CHECK_EQ(all.bytes(), size_t{2 * 5 + 3 * 7});
    all.cut(1, 0);
    CHECK_EQ(all.bytes(), size_t{2 * 5});
}

TEST(what_was_used_longest_ago_makes_room) {
    StateCheckpoints all(100);
    all.add(0, 10, state(40));
    all.add(0, 20, state(40));
    CHECK_EQ(all.use(0, 10).size(), size_t{40});
    all.add(1, 5, state(60));
    CHECK_EQ(all.longest(0, 100), 10);
    CHECK_EQ(all.bytes(), size_t{100});
    all.add(1, 6, state(101));  // larger than all the room: nothing else is given up for it
    CHECK_EQ(all.longest(1, 100), 5);
    CHECK_EQ(all.bytes(), size_t{100});
}

TEST(without_room_there_are_none) {
    StateCheckpoints none(0);
    CHECK(!none.enabled());
    none.add(0, 10, state(1));
    CHECK_EQ(none.bytes(), size_t{0});
}
