#include "engine/candidates.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <string_view>

namespace atoll_core::engine {
namespace {

struct Place {
  std::string host;
  std::uint16_t port = 0;
};

// False if what stands after the colon is no port.
bool read_port(std::string_view text, std::uint16_t* port) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *port);
  return error == std::errc() && end == text.data() + text.size();
}

bool read_place(std::string_view text, std::uint16_t port, Place* out) {
  out->port = port;
  if (text.starts_with('[')) {
    const std::size_t end = text.find(']');
    if (end == std::string_view::npos) return false;
    out->host = text.substr(1, end - 1);
    const std::string_view rest = text.substr(end + 1);
    return rest.empty() || (rest.starts_with(':') && read_port(rest.substr(1), &out->port));
  }
  const std::size_t colon = text.find(':');
  const bool has_port = colon != std::string_view::npos && text.rfind(':') == colon;
  out->host = has_port ? text.substr(0, colon) : text;
  return !has_port || read_port(text.substr(colon + 1), &out->port);
}

Status add(const Place& place, bool numeric_only, std::vector<Candidate>* out) {
  std::vector<Address> found;
  if (Status s = resolve(place.host, place.port, numeric_only, &found); !s.ok()) return s;
  const std::string port = " port " + std::to_string(place.port);
  for (const Address& address : found) {
    const std::string number = host_text(address);
    const bool is_name = number != place.host && found.size() > 1;
    std::string text = place.host + (is_name ? " (" + number + ")" : "") + port;
    const bool known = std::ranges::find(*out, text, &Candidate::text) != out->end();
    if (!known && out->size() < kMostCandidates) out->push_back({address, std::move(text)});
  }
  return success();
}

}  // namespace

Status find_candidates(const std::string& hosts, std::uint16_t port, bool numeric_only,
                       std::vector<Candidate>* out) {
  Status failure = {Kind::kSystem, "no address is given", EADDRNOTAVAIL};
  bool failed = false;
  for (std::size_t begin = 0; begin <= hosts.size();) {
    const std::size_t end = std::min(hosts.find(',', begin), hosts.size());
    const std::string text = hosts.substr(begin, end - begin);
    begin = end + 1;
    Place place;
    Status status = read_place(text, port, &place)
                        ? add(place, numeric_only, out)
                        : Status{Kind::kSystem, "\"" + text + "\" has no port after the colon", EINVAL};
    if (status.ok()) continue;
    failed = true;
    failure = std::move(status);
  }
  const bool good = numeric_only ? !failed : !out->empty();
  return good ? success() : failure;
}

}  // namespace atoll_core::engine
