// The last failed check of this thread. A torch operator can only raise RuntimeError; the Python layers ask here for
// the kind and the argument.
#pragma once

#include "problem.h"

namespace cudnn_grouped {

CG_API void set_last_error(Error error);
CG_API std::optional<Error> take_last_error();

}  // namespace cudnn_grouped
