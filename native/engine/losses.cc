#include "engine/losses.h"

namespace atoll_core::engine {
namespace {

// A lost segment goes out again a round trip later at the soonest; by then its queue may be gone.
constexpr double kRemembered = 8;  // round trips
constexpr double kEnough = 500;    // segments

}  // namespace

void Losses::saw(std::uint64_t sent, std::uint64_t again, bool queued, Time now,
                 Seconds round_trip) {
  if (queued) counts_from_ = now + to_duration(kRemembered * round_trip);
  if (now < counts_from_) return;
  sent_ += static_cast<double>(sent);
  again_ += static_cast<double>(again);
}

void Losses::op_ended() {
  sent_ /= 2;
  again_ /= 2;
}

double Losses::share() const { return sent_ < kEnough ? 0.0 : again_ / sent_; }

}  // namespace atoll_core::engine
