// Calls every function named on standard input with nothing but zeros, as
// nobody should, and prints what each answered.
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

typedef int (*function)(long, long, long, long, long, long);

int main(int argc, char **argv)
{
    void *lib = argc == 2 ? dlopen(argv[1], RTLD_NOW) : 0;
    char name[256];

    if (!lib)
        return fprintf(stderr, "%s\n", dlerror()), 1;
    int initialized = ((function)dlsym(lib, "nvmlInit_v2"))(0, 0, 0, 0, 0, 0);
    fprintf(stderr, "nvmlInit_v2: %d\n", initialized);
    while (fgets(name, sizeof name, stdin)) {
        name[strcspn(name, "\n")] = 0;
        function f = (function)dlsym(lib, name);
        printf("%s %d\n", name, f ? f(0, 0, 0, 0, 0, 0) : -1);
    }
    return 0;
}
