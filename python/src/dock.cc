#include "dock.h"

#include <algorithm>
#include <cerrno>
#include <set>
#include <string>

namespace tensorferry::python {

namespace {

// So much memory may wait to be let go of.
constexpr std::size_t sweep_bytes = std::size_t{256} << 20;

// For the end of the interpreter. Guarded by the GIL.
std::set<Dock*>& live_docks() {
  static auto& docks = *new std::set<Dock*>();
  return docks;
}

}  // namespace

Dock::Dock() { live_docks().insert(this); }
Dock::~Dock() { live_docks().erase(this); }

PyOperation Dock::launch(std::shared_ptr<Flight> flight) {
  if (closed()) {  // while the operation was started
    flight->cancel_and_reap();
    return {std::move(flight)};
  }
  flights_.push_back(flight);
  for (const Buffer& buffer : flight->buffers) launched_bytes_ += buffer.bytes().size();
  if (flights_.size() >= sweep_at_ || launched_bytes_ > sweep_bytes) sweep();
  return {std::move(flight)};
}

PyOperation Dock::launch(Operation operation, std::vector<Buffer> buffers) {
  return launch(std::make_shared<Flight>(Flight{std::move(operation), std::move(buffers), false}));
}

void Dock::close() {
  if (closed()) return;
  closing_ = true;  // no new work: the wait shall have an end
  while (!flights_.empty()) {
    std::vector<std::shared_ptr<Flight>> flights = std::exchange(flights_, {});
    for (std::size_t i = 0; i < flights.size(); ++i) {
      const bool seen = flights[i]->seen;
      try {
        (void)flights[i]->wait(-1);
      } catch (const Error& error) {
        if (!seen) keep_unseen(error);
      } catch (...) {  // Ctrl-C: it is open again, with what was not waited for
        flights_.insert(flights_.end(), flights.begin() + static_cast<std::ptrdiff_t>(i),
                        flights.end());
        closing_ = false;
        throw;
      }
    }
  }
  end();
  if (const auto error = std::exchange(unseen_, std::nullopt)) throw Error(*error);
}

void Dock::end() {
  std::shared_ptr<void> ending = take_out();
  if (ending == nullptr) return;
  const std::vector<std::shared_ptr<Flight>> flights = std::exchange(flights_, {});
  std::size_t cut_short = 0;
  for (const auto& flight : flights) cut_short += !flight->operation.done() && !flight->seen;
  {
    const Unlocked unlocked;
    for (const auto& flight : flights) flight->operation.cancel();
    for (const auto& flight : flights) flight->reap();
    ending.reset();
  }
  if (cut_short > 0) {
    log(std::to_string(cut_short) + " operations were cancelled because their handle was ended");
  }
  for (const auto& flight : flights) {
    const auto error = flight->seen ? std::nullopt : flight->operation.error();
    if (error && error->code() != ECANCELED) keep_unseen(*error);
    flight->let_go();
  }
}

void Dock::end_all() {
  for (Dock* dock : std::vector<Dock*>(live_docks().begin(), live_docks().end())) {
    if (live_docks().contains(dock)) dock->end();
  }
  Unlocked::let_others_return();
}

void Dock::log(const std::string& text) noexcept {
  try {
    nb::module_::import_("logging")
        .attr("getLogger")("tensorferry")
        .attr("warning")("%s", shown(text));
  } catch (...) {  // a handler of the log that raises must not lose an operation
    PyErr_Clear();
  }
}

// The first is raised by close(); all are logged.
void Dock::keep_unseen(const Error& error) noexcept {
  if (!unseen_) unseen_ = error;
  log(std::string("an operation failed that nobody waited for: ") + error.what());
}

// Python may run only at the end, when everything is in its place: finalizers may call back.
void Dock::sweep() {
  std::vector<std::shared_ptr<Flight>> done;
  std::erase_if(flights_, [&done](const std::shared_ptr<Flight>& flight) {
    if (!flight->operation.done()) return false;
    done.push_back(flight);
    // One that failed is kept while the user may still ask.
    return flight->seen || flight.use_count() == 2 || !flight->operation.error();
  });
  sweep_at_ = std::max<std::size_t>(64, 2 * flights_.size());
  launched_bytes_ = 0;
  for (const auto& flight : done) {
    const bool forgotten = !flight->seen && flight.use_count() == 1;
    const auto error = forgotten ? flight->operation.error() : std::nullopt;
    if (error) keep_unseen(*error);
    flight->let_go();
  }
}

}  // namespace tensorferry::python
