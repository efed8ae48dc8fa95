#include "last_error.h"

#include <utility>

namespace cudnn_grouped {

static thread_local std::optional<Error> last_error;

void set_last_error(Error error) { last_error = std::move(error); }
std::optional<Error> take_last_error() { return std::exchange(last_error, std::nullopt); }

}  // namespace cudnn_grouped
