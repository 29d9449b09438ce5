// Marks what the shared library shows to the outside; everything else is hidden.
#pragma once

#define TENSORFERRY_EXPORT [[gnu::visibility("default")]]
