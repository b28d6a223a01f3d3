// Where a node is dialled: numbers, and names that are looked up.
#include "engine/connections.h"

namespace atoll_core::engine {

// The numbers are there at once; those of names are added as they are found. False while none is.
bool Connections::has_candidates(Neighbour& neighbour) {
  Dialling& dialling = neighbour.dialling;
  if (dialling.candidates.empty() && dialling.names.empty())
    numeric_candidates(neighbour.host, neighbour.port, &dialling.candidates, &dialling.names);
  // What failed is looked up again until an address has answered.
  if (!dialling.won && dialling.resolving.empty()) look_up_names(neighbour);
  return !dialling.candidates.empty();
}

void Connections::look_up_names(Neighbour& neighbour) {
  Dialling& dialling = neighbour.dialling;
  if (dialling.candidates.empty()) dialling.errors.clear();
  for (const std::string& name : dialling.names) {
    dialling.resolving.insert(name);
    look_ups_.submit(name, neighbour.port,
                     [this, node = neighbour.name, place = dialling.place, name](
                         const Status& status, const std::vector<Candidate>& found) {
                       loop_.post([this, node, place, name, status, found] {
                         resolved(node, place, name, status, found);
                       });
                     });
  }
}

void Connections::resolved(const NodeName& node, std::uint64_t place, const std::string& name,
                           const Status& status, const std::vector<Candidate>& found) {
  Neighbour& neighbour = neighbour_of(node);
  Dialling& dialling = neighbour.dialling;
  if (dialling.place != place) return;  // it has moved meanwhile
  dialling.resolving.erase(name);
  if (!status.ok()) {
    dialling.errors += (dialling.errors.empty() ? "" : "; ") + ("could not connect to " + name) + ": " +
                       status.text;
    if (!dialling.resolving.empty() || dialling.racing) return;
    if (dialling.candidates.empty()) {
      pass_failed(neighbour, Refusal::kNot);
    } else {
      conclude(neighbour);
    }
    return;
  }
  std::erase(dialling.names, name);
  add_candidates(found, &dialling.candidates);
  if (dialling.racing) {
    const bool more = dialling.next_candidate < dialling.candidates.size();
    if (more && dialling.next_start == Time::max()) dialling.next_start = Clock::now();
    return;
  }
  schedule(neighbour, Clock::duration{0});
  if (dialling.asked) race(neighbour);
}

}  // namespace atoll_core::engine
