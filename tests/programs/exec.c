/* Executes a program with an environment that is out: a list with one entry, in memory that was pushed out. */
#include "check.h"

int main(int count, char **words)
{
    CHECK(count > 1);
    char *area = filled(LARGE, 1), **list = (char **)(area + MIB), *entry = area + 2 * MIB + PAGE - 5;
    strcpy(entry, "ONLY=this");
    list[0] = entry;
    list[1] = NULL;
    push_out();
    REQUIRE_OUT(list, PAGE);
    REQUIRE_OUT((char *)((uintptr_t)entry / PAGE * PAGE), 2 * PAGE);
    execve(words[1], words + 1, list);
    FAIL("execve: %s", strerror(errno));
}
