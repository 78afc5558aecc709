/* A library with variables that are zero when it is loaded. Farpage's tests load it and put it away. */
#include <stddef.h>

static char variables[1 << 20];

char *variables_of_library(size_t *bytes)
{
    *bytes = sizeof variables;
    return variables;
}
