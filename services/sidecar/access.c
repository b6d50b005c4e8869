/* SPDX-License-Identifier: Apache-2.0 */
#include "services/sidecar/access.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_TOKENS = 256, MAX_TOKEN = 4096 };

struct entry {
    enum ps_role role;
    /* Digests have one length, so that no comparison tells how long a token is. */
    char digest[PS_SHA256_HEX], session[PS_SHA256_HEX];
};

struct ps_access {
    pthread_mutex_t lock; /* guards what follows */
    bool open;
    struct entry *entries;
    size_t count;
};

static const char *const role_names[] = {"none", "read", "write", "admin"};

const char *ps_role_name(enum ps_role role)
{
    return role_names[role];
}

struct ps_access *ps_access_new(void)
{
    struct ps_access *access = calloc(1, sizeof *access);
    if (access) {
        pthread_mutex_init(&access->lock, NULL);
        access->open = true;
    }
    return access;
}

struct ps_access *ps_access_free(struct ps_access *access)
{
    if (!access)
        return NULL;
    pthread_mutex_destroy(&access->lock);
    free(access->entries);
    free(access);
    return NULL;
}

/* sha256 over purpose and text. */
static bool digest(const char *purpose, const char *text, char out[PS_SHA256_HEX])
{
    struct ps_sha256 *sha = ps_sha256_new();
    if (!sha)
        return false;
    ps_sha256_update(sha, purpose, strlen(purpose));
    ps_sha256_update(sha, text, strlen(text));
    ps_sha256_hex(sha, out);
    ps_sha256_free(sha);
    return true;
}

static const char token_purpose[] = "paramsync token 1\n";
static const char session_purpose[] = "paramsync browser session 1\n";

/* One line, cut off its blanks; *ret_used tells whether it held a token. */
static int take_line(char *line, unsigned number, const char *source, struct entry *entry, bool *ret_used,
                     struct ps_error *err)
{
    *ret_used = false;
    char *from = line + strspn(line, " \t");
    size_t n = strcspn(from, "\r\n");
    while (n && (from[n - 1] == ' ' || from[n - 1] == '\t'))
        n--;
    from[n] = '\0';
    if (!n && number == 1)
        return ps_fail(err, PS_INVALID_ARGUMENT, "%s: the first line, which is the token, is empty", source);
    if (!n || (*from == '#' && number > 1))
        return 0;
    entry->role = number == 1 ? PS_ROLE_ADMIN : PS_ROLE_NONE;
    char *token = from;
    size_t word = strcspn(from, " \t");
    for (int role = PS_ROLE_READ; word < n && role <= PS_ROLE_ADMIN; role++)
        if (strlen(role_names[role]) == word && !strncmp(from, role_names[role], word)) {
            entry->role = (enum ps_role)role;
            token = from + word + strspn(from + word, " \t");
        }
    if (entry->role == PS_ROLE_NONE)
        return ps_fail(err, PS_INVALID_ARGUMENT,
                       "%s, line %u: expected ROLE TOKEN with a role of read, write or admin", source,
                       number);
    for (const char *c = token; *c; c++)
        if ((unsigned char)*c < 0x21 || (unsigned char)*c > 0x7e)
            return ps_fail(err, PS_INVALID_ARGUMENT,
                           "%s, line %u: the token may only have printable ASCII characters", source, number);
    if (strlen(token) > MAX_TOKEN)
        return ps_fail(err, PS_INVALID_ARGUMENT, "%s, line %u: the token is longer than %d characters",
                       source, number, MAX_TOKEN);
    if (!digest(token_purpose, token, entry->digest) || !digest(session_purpose, token, entry->session))
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    *ret_used = true;
    return 0;
}

int ps_access_load(struct ps_access *access, const char *text, const char *source, struct ps_error *err)
{
    struct entry *entries = text ? calloc(MAX_TOKENS, sizeof *entries) : NULL;
    char *copy = text ? strdup(text) : NULL;
    size_t count = 0;
    int code = text && (!entries || !copy) ? ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory") : 0;
    unsigned number = 1;
    for (char *line = copy; !code && line; number++) {
        char *next = strchr(line, '\n');
        if (next)
            *next++ = '\0';
        bool used = false;
        struct entry entry;
        code = take_line(line, number, source, &entry, &used, err);
        if (!code && used && count == MAX_TOKENS)
            code = ps_fail(err, PS_INVALID_ARGUMENT, "%s, line %u: at most %d tokens are allowed", source,
                           number, MAX_TOKENS);
        for (size_t i = 0; !code && used && i < count; i++)
            if (!strcmp(entries[i].digest, entry.digest))
                code = ps_fail(err, PS_INVALID_ARGUMENT, "%s, line %u: this token stands there already",
                               source, number);
        if (!code && used)
            entries[count++] = entry;
        line = next;
    }
    free(copy);
    if (code) {
        free(entries);
        return code;
    }
    pthread_mutex_lock(&access->lock);
    struct entry *old = access->entries;
    access->entries = entries;
    access->count = count;
    access->open = text == NULL;
    pthread_mutex_unlock(&access->lock);
    free(old);
    return 0;
}

bool ps_access_is_open(struct ps_access *access)
{
    pthread_mutex_lock(&access->lock);
    bool open = access->open;
    pthread_mutex_unlock(&access->lock);
    return open;
}

static bool same(const char a[PS_SHA256_HEX], const char b[PS_SHA256_HEX])
{
    volatile unsigned char difference = 0;
    for (size_t i = 0; i < PS_SHA256_HEX; i++)
        difference |= (unsigned char)(a[i] ^ b[i]);
    return difference == 0;
}

/* The entry with this digest (as a session's, or as a token's); its copy in *ret_entry. */
static enum ps_role look_up(struct ps_access *access, const char hex[PS_SHA256_HEX], bool session,
                            struct entry *ret_entry)
{
    enum ps_role role = PS_ROLE_NONE;
    pthread_mutex_lock(&access->lock);
    for (size_t i = 0; i < access->count; i++) /* all of them, whichever it is */
        if (same(session ? access->entries[i].session : access->entries[i].digest, hex)) {
            role = access->entries[i].role;
            *ret_entry = access->entries[i];
        }
    pthread_mutex_unlock(&access->lock);
    return role;
}

enum ps_role ps_access_role(struct ps_access *access, const char *token)
{
    char hex[PS_SHA256_HEX];
    struct entry entry;
    if (ps_access_is_open(access))
        return PS_ROLE_ADMIN;
    if (!token || !digest(token_purpose, token, hex))
        return PS_ROLE_NONE;
    return look_up(access, hex, false, &entry);
}

bool ps_access_session(struct ps_access *access, const char *token, char ret_session[PS_SHA256_HEX])
{
    char hex[PS_SHA256_HEX];
    struct entry entry;
    if (!digest(token_purpose, token, hex) || look_up(access, hex, false, &entry) == PS_ROLE_NONE)
        return false;
    memcpy(ret_session, entry.session, PS_SHA256_HEX);
    return true;
}

enum ps_role ps_access_session_role(struct ps_access *access, const char *session)
{
    struct entry entry;
    char padded[PS_SHA256_HEX] = "";
    if (ps_access_is_open(access))
        return PS_ROLE_ADMIN;
    if (!session || strlen(session) != PS_SHA256_HEX - 1)
        return PS_ROLE_NONE;
    memcpy(padded, session, sizeof padded);
    return look_up(access, padded, true, &entry);
}
