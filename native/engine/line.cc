#include "engine/line.h"

namespace atoll_core::engine {

void share_out(double line, std::span<Claim> claims) {
  double left = line, owed = 0;
  for (Claim& claim : claims) {
    claim.allowed = claim.own;
    claim.by_the_line = line > 0 && claim.owed > 0;
    if (claim.by_the_line) owed += claim.owed;
  }
  for (bool again = true; again;) {
    again = false;
    for (Claim& claim : claims) {
      if (!claim.by_the_line || claim.own <= 0 || claim.own * owed >= left * claim.owed) continue;
      claim.by_the_line = false;
      left -= claim.own;
      owed -= claim.owed;
      again = true;
    }
  }
  for (Claim& claim : claims) {
    if (claim.by_the_line) claim.allowed = left * claim.owed / owed;
  }
}

}  // namespace atoll_core::engine
