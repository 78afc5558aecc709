/* Executes a program with an environment that is out: the list and its one entry lie in memory that was
 * pushed out. With `exec` the program takes this one's place. With `spawn` it runs in a child, which shares
 * this process's memory until it executes the program. */
#include "check.h"
#include <spawn.h>
#include <sys/wait.h>

int main(int count, char **words)
{
    CHECK(count > 2);
    char *area = filled(LARGE, 1), **list = (char **)(area + MIB), *entry = area + 2 * MIB + PAGE - 5;
    strcpy(entry, "ONLY=this");
    list[0] = entry;
    list[1] = NULL;
    push_out();
    REQUIRE_OUT(list, PAGE);
    REQUIRE_OUT((char *)((uintptr_t)entry / PAGE * PAGE), 2 * PAGE);
    if (strcmp(words[1], "exec") == 0) {
        execve(words[2], words + 2, list);
        FAIL("execve: %s", strerror(errno));
    }
    pid_t child;
    int status;
    CHECK(posix_spawn(&child, words[2], NULL, NULL, words + 2, list) == 0);
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
    return WEXITSTATUS(status);
}
