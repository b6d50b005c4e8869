/* SPDX-License-Identifier: Apache-2.0 */
#include "services/base/module.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The program's folder, through links, so that a linked program finds its modules. */
static int beside_program(char *out, size_t size)
{
    char exe[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", exe, sizeof exe - 1);
    if (n <= 0)
        return -1;
    exe[n] = '\0';
    char *slash = strrchr(exe, '/');
    if (!slash)
        return -1;
    *slash = '\0';
    int used = snprintf(out, size, "%s/../lib/paramsync", exe);
    return used > 0 && (size_t)used < size ? 0 : -1;
}

int ps_module_open(const char *name, const char *symbol, void **ret_symbol, struct ps_error *err)
{
    size_t length = strlen(name);
    if (length < 1 || length > 31 || strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789_") != length)
        return ps_fail(err, PS_INVALID_ARGUMENT, "'%.40s' is no module's name", name);

    char beside[PATH_MAX + 32];
    const char *folders[2];
    int count = 0;
    const char *only = getenv("PARAMSYNC_MODULE_DIR");
    if (only && *only) {
        folders[count++] = only;
    } else {
        if (beside_program(beside, sizeof beside) == 0)
            folders[count++] = beside;
        folders[count++] = PARAMSYNC_MODULE_FOLDER;
    }

    for (int i = 0; i < count; i++) {
        char path[2 * PATH_MAX];
        int used = snprintf(path, sizeof path, "%s/libparamsync-%s.so", folders[i], name);
        if (used < 0 || (size_t)used >= sizeof path || access(path, F_OK) < 0)
            continue;
        void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (!handle) {
            const char *why = dlerror();
            return ps_fail(err, PS_UNAVAILABLE, "module %s cannot be loaded: %s", name,
                           why ? why : "no reason given");
        }
        void *found = dlsym(handle, symbol);
        if (!found)
            return ps_fail(err, PS_INTERNAL, "module %s has no %s: it belongs to another version", path,
                           symbol);
        *ret_symbol = found;
        return 0;
    }
    return ps_fail(err, PS_UNAVAILABLE, "module %s is not there: no libparamsync-%s.so in %s%s%s", name, name,
                   folders[0], count > 1 ? " or " : "", count > 1 ? folders[1] : "");
}
