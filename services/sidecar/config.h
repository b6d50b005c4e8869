/* SPDX-License-Identifier: Apache-2.0
 * The sidecar's config file and the rules about where it may listen. */
#ifndef PARAMSYNC_SIDECAR_CONFIG_H
#define PARAMSYNC_SIDECAR_CONFIG_H

#include "services/base/options.h"

struct ps_config_file; /* holds the texts that settings point to */

/* Sets the options named in an INI file: NAME = VALUE lines, # and ; begin comments, [sections] only group
 * lines. Names are those of the flags. Errors name the file and line. Takes effect over what settings hold;
 * read the command line again afterwards so that it wins. */
int ps_config_read(const struct ps_options *table, void *settings, const char *path,
                   struct ps_config_file **ret_file, struct ps_error *err);
struct ps_config_file *ps_config_free(struct ps_config_file *file); /* takes NULL, returns NULL */

/* Whether only this machine can reach "ADDR:PORT": loopback addresses, localhost and unix sockets. */
bool ps_listen_is_local(const char *listen);
/* FAILED_PRECONDITION, with the remedy, for an address that others can reach without TLS; flag is the
 * option's name. */
int ps_check_listen(const char *flag, const char *listen, bool tls, bool insecure, struct ps_error *err);

#endif
