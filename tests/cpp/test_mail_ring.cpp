// The rings of messages with tags, record by record.
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "host/group.hpp"
#include "host/mail_ring.hpp"
#include "messages.hpp"

namespace unisono::test {
namespace {

constexpr std::size_t kRecordBytes = 16000;
constexpr std::chrono::seconds kTimeout(60);

// Runs writes(group) on a rank, and reads(group) on another one.
template <class Writes, class Reads>
void on_ends(const Writes& writes, const Reads& reads) {
  const auto bootstraps = thread_bootstraps(2, kTimeout);
  const auto run = [&](std::size_t rank, const auto& body) {
    Group group(*bootstraps[rank], kTimeout.count(), false, {});
    body(group);
    group.exchange(0);
    group.leave();
  };
  std::thread other([&] { run(0, writes); });
  run(1, reads);
  other.join();
}

host::Cells no_cells(const Group& group) { return {group.rank(), {}, 0, 0, {}}; }

MailHead head_of(std::size_t bytes) { return {MailHead::eager, DType::u8, 1, bytes, 0, 0, 0}; }

bool put(MailWriter& ring, int number) {
  const Bytes data = content(0, 1, number, kRecordBytes);
  return ring.put(head_of(kRecordBytes), reinterpret_cast<const std::byte*>(data.data()), kRecordBytes);
}

// A writer that is far ahead times a record when the reader has told the time of the last one.
TEST(MailRing, TimesOneRecordAtATime) {
  constexpr std::array kTurns{40, 24};
  std::vector<int> timed;
  bool crowded = false;
  on_ends(
      [&](Group& group) {
        host::Cells none = no_cells(group);
        MailWriter ring(group, none, 1, 0);
        int number = 0;
        for (const int records : kTurns) {
          for (const int end = number + records; number < end; ++number) EXPECT_TRUE(put(ring, number));
          group.exchange(0);  // they are there
          group.exchange(0);  // they have been read
        }
      },
      [&](Group& group) {
        host::Cells none = no_cells(group);
        MailReader ring(group, none, 1, 0);
        crowded = group.patience().crowded;
        int number = 0;
        for (const int records : kTurns) {
          group.exchange(0);
          for (const int end = number + records; number < end; ++number) {
            ASSERT_TRUE(ring.ready());
            const auto record = ring.look();
            ASSERT_TRUE(record);
            if (record->timed) timed.push_back(number);
            Bytes data(record->bytes());
            record->copy_to(reinterpret_cast<std::byte*>(data.data()));
            EXPECT_EQ(data, content(0, 1, number, kRecordBytes)) << number;
            ring.pop(*record);
          }
          group.exchange(0);
        }
      });
  EXPECT_EQ(timed, crowded ? std::vector<int>{} : std::vector({8, 40}));
}

// The writer names a cell that this reader does not know.
TEST(MailRing, ACellThatIsNotThereIsNoMessage) {
  on_ends(
      [](Group& group) {
        host::Cells cells = MailRing::cells_of(group);
        MailWriter ring(group, cells, 1, 0);
        EXPECT_TRUE(put(ring, 0));
        group.exchange(0);
      },
      [](Group& group) {
        host::Cells cells = no_cells(group);
        MailReader ring(group, cells, 1, 0);
        group.exchange(0);
        EXPECT_TRUE(ring.ready());
        EXPECT_EQ(ring.look().has_value(), !group.uses_cells());
      });
}

}  // namespace
}  // namespace unisono::test
