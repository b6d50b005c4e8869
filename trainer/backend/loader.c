/* SPDX-License-Identifier: Apache-2.0 */
#include "services/base/module.h"
#include "trainer/backend/backend.h"
#include "trainer/backend/ref/ref.h"

#include <string.h>

/* LeakSanitizer (of GCC 12) crashes on the thread-local memory of modules loaded at run time unless it lets
 * __tls_get_addr be. Programs that load backends carry the setting along. */
#if defined(__SANITIZE_ADDRESS__)
const char *__asan_default_options(void);
const char *__asan_default_options(void)
{
    return "intercept_tls_get_addr=0";
}
#endif

typedef const struct ps_backend_ops *(*module_function)(void);

int ps_backend_load(const char *name, const struct ps_backend_ops **ret_ops, struct ps_error *err)
{
    const struct ps_backend_ops *ops;
    if (strcmp(name, "ref") == 0) {
        ops = ps_backend_ref();
    } else {
        void *symbol;
        int r = ps_module_open(name, "ps_backend_module", &symbol, err);
        if (r < 0) {
            ps_error_prefix(err, "backend");
            return r;
        }
        module_function function;
        memcpy(&function, &symbol, sizeof function); /* ISO C has no cast from data to function pointers */
        ops = function();
    }
    if (!ops || ops->abi != PS_BACKEND_ABI)
        return ps_fail(err, PS_UNAVAILABLE, "backend %s belongs to another version (interface %u, not %u)",
                       name, ops ? ops->abi : 0, (unsigned)PS_BACKEND_ABI);
    *ret_ops = ops;
    return 0;
}
