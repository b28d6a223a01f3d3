// Pieces under way: whatever breaks and whenever, every piece is acked in the end, and none is sent
// again whose link still lives.
#include <cstdio>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "engine/under_way.h"
#include "tests/check.h"

namespace {

using namespace atoll_core::engine;

constexpr std::uint32_t kTo = 1;

Piece piece(std::uint32_t chunk) { return {Phase::kContribution, chunk}; }

void a_lost_link_gives_back_its_own_pieces_only() {
  UnderWay under_way(2);
  under_way.sent(kTo, piece(0), 10);
  under_way.sent(kTo, piece(1), 11);
  under_way.sent(kTo, {Phase::kFinished, 0}, 10);
  CHECK(under_way.acked(kTo, piece(1)));
  CHECK(!under_way.acked(kTo, piece(1)));
  under_way.sent(kTo, piece(2), 11);
  CHECK((under_way.link_lost(kTo, 10) == std::vector<Piece>{piece(0), {Phase::kFinished, 0}}));
  CHECK(under_way.link_lost(kTo, 10).empty());
  CHECK(under_way.link_lost(0, 11).empty());  // of another node
  CHECK(!under_way.acked(kTo, piece(0)));
  CHECK(under_way.acked(kTo, piece(2)));
}

// Links come, carry pieces, deliver some, break; the model knows what must happen.
void any_order_of_breaks_ends_well(unsigned seed) {
  std::mt19937 random(seed);
  UnderWay under_way(2);
  std::set<std::uint32_t> unsent, unacked;
  for (std::uint32_t chunk = 0; chunk < 40; ++chunk) {
    unsent.insert(chunk);
    unacked.insert(chunk);
  }
  std::map<LinkId, std::vector<std::uint32_t>> links{{1, {}}, {2, {}}};
  LinkId newest = 2;
  for (int step = 0; !unacked.empty(); ++step) {
    CHECK(step < 100000);
    if (step >= 100000) return;
    auto link = std::next(links.begin(), static_cast<int>(random() % links.size()));
    switch (random() % 4) {
      case 0:
        if (random() % 4 == 0) {
          for (const Piece& lost : under_way.link_lost(kTo, link->first)) unsent.insert(lost.chunk);
          links.erase(link);
          links[++newest];
        }
        break;
      case 1:
        if (!link->second.empty()) {
          const std::uint32_t chunk = link->second.back();
          link->second.pop_back();
          CHECK(under_way.acked(kTo, piece(chunk)));
          CHECK(unacked.erase(chunk) == 1);
        }
        break;
      default: {
        if (unsent.empty()) break;
        const std::uint32_t next = *unsent.begin();
        unsent.erase(unsent.begin());
        for (const auto& [id, carried] : links)
          for (const std::uint32_t chunk : carried) CHECK(chunk != next);
        under_way.sent(kTo, piece(next), link->first);
        link->second.push_back(next);
      }
    }
  }
  for (const auto& [id, carried] : links) CHECK(under_way.link_lost(kTo, id).empty());
}

}  // namespace

int main() {
  a_lost_link_gives_back_its_own_pieces_only();
  for (unsigned seed = 0; seed < 500; ++seed) {
    const int before = atoll_test::failures();
    any_order_of_breaks_ends_well(seed);
    if (atoll_test::failures() != before) std::fprintf(stderr, "seed %u\n", seed);
  }
  return atoll_test::failures() == 0 ? 0 : 1;
}
