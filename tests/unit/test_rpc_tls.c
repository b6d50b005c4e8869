/* SPDX-License-Identifier: Apache-2.0
 * TLS and mutual TLS between the two sides, with certificates made on the spot; rule 31: bad PEM is named at
 * the start. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "services/base/pem.h"
#include "tests/unit/test_rpc_probe.h"

#include <openssl/ec.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>

struct identity {
    EVP_PKEY *key;
    X509 *certificate;
    char *key_pem, *certificate_pem; /* owned */
};

static char *take(BIO *bio)
{
    char *data;
    long size = BIO_get_mem_data(bio, &data);
    char *text = strndup(data, (size_t)size);
    BIO_free(bio);
    return text;
}

/* issuer NULL: signs itself and may sign others. */
static struct identity make_identity(const char *name, const struct identity *issuer)
{
    struct identity id = {.key = EVP_EC_gen("P-256"), .certificate = X509_new()};
    assert_non_null(id.key);
    X509_set_version(id.certificate, 2);
    ASN1_INTEGER_set(X509_get_serialNumber(id.certificate), issuer ? 2 : 1);
    X509_gmtime_adj(X509_getm_notBefore(id.certificate), -60);
    X509_gmtime_adj(X509_getm_notAfter(id.certificate), 3600);
    X509_set_pubkey(id.certificate, id.key);
    X509_NAME *subject = X509_get_subject_name(id.certificate);
    X509_NAME_add_entry_by_txt(subject, "CN", MBSTRING_UTF8, (const unsigned char *)name, -1, -1, 0);
    X509_set_issuer_name(id.certificate, issuer ? X509_get_subject_name(issuer->certificate) : subject);
    X509V3_CTX context;
    X509V3_set_ctx_nodb(&context);
    X509V3_set_ctx(&context, issuer ? issuer->certificate : id.certificate, id.certificate, NULL, NULL, 0);
    X509_EXTENSION *extension =
        X509V3_EXT_conf_nid(NULL, &context, issuer ? NID_subject_alt_name : NID_basic_constraints,
                            issuer ? "IP:127.0.0.1,DNS:localhost" : "critical,CA:TRUE");
    assert_non_null(extension);
    X509_add_ext(id.certificate, extension, -1);
    X509_EXTENSION_free(extension);
    assert_true(X509_sign(id.certificate, issuer ? issuer->key : id.key, EVP_sha256()) > 0);
    BIO *bio = BIO_new(BIO_s_mem());
    PEM_write_bio_X509(bio, id.certificate);
    id.certificate_pem = take(bio);
    bio = BIO_new(BIO_s_mem());
    PEM_write_bio_PrivateKey(bio, id.key, NULL, NULL, 0, NULL, NULL);
    id.key_pem = take(bio);
    return id;
}

static void drop_identity(struct identity *id)
{
    EVP_PKEY_free(id->key);
    X509_free(id->certificate);
    free(id->key_pem);
    free(id->certificate_pem);
}

static struct identity authority, server_id, client_id, stranger;

static int make_all(void **state)
{
    (void)state;
    authority = make_identity("test authority", NULL);
    server_id = make_identity("server", &authority);
    client_id = make_identity("client", &authority);
    stranger = make_identity("stranger", NULL);
    return 0;
}

static int drop_all(void **state)
{
    (void)state;
    drop_identity(&authority);
    drop_identity(&server_id);
    drop_identity(&client_id);
    drop_identity(&stranger);
    return 0;
}

static const char *const loopback[] = {"127.0.0.1:0"};

static struct ps_rpc_server_config config_with(struct probe *probe, const char *cert, const char *key,
                                               const char *ca)
{
    return (struct ps_rpc_server_config){
        .listen = loopback,
        .listen_count = 1,
        .methods = probe_methods,
        .method_count = PROBE_METHODS,
        .context = probe,
        .tls_cert = cert,
        .tls_key = key,
        .tls_ca = ca,
        .descriptor_set = probe_descriptor_set,
        .descriptor_set_size = probe_descriptor_set_size,
    };
}

static int call_with(const struct ps_rpc_server *server, const char *ca, const char *cert, const char *key,
                     struct ps_error *err)
{
    char target[64];
    snprintf(target, sizeof target, "127.0.0.1:%d", ps_rpc_server_port(server, 0));
    struct ps_rpc_channel_config client = {
        .target = target, .token = "secret", .tls_ca = ca, .tls_cert = cert, .tls_key = key};
    struct ps_rpc_channel *channel = NULL;
    int code = ps_rpc_channel_open(&client, &channel, err);
    if (code < 0)
        return code;
    Note note = NOTE_INIT;
    note.text = "over TLS";
    ProtobufCMessage *message = NULL;
    code = ps_rpc_unary(channel, PROBE("Echo"), &note.base, NOTE_TYPE, 10, false, &message, err);
    if (code == 0) {
        assert_string_equal(((Note *)message)->text, "over TLS");
        protobuf_c_message_free_unpacked(message, NULL);
    }
    ps_rpc_channel_free(channel);
    return code;
}

static void test_tls(void **state)
{
    (void)state;
    struct probe probe;
    probe_init(&probe);
    struct ps_error err = {0};
    struct ps_rpc_server *server = NULL;
    struct ps_rpc_server_config config =
        config_with(&probe, server_id.certificate_pem, server_id.key_pem, NULL);
    assert_int_equal(ps_rpc_server_start(&config, &server, &err), 0);
    assert_int_equal(call_with(server, authority.certificate_pem, NULL, NULL, &err), 0);
    assert_int_equal(call_with(server, stranger.certificate_pem, NULL, NULL, &err), PS_UNAVAILABLE);
    assert_int_equal(call_with(server, NULL, NULL, NULL, &err), PS_UNAVAILABLE); /* plain */
    ps_rpc_server_free(server);
    probe_done(&probe);
}

static void test_mutual_tls(void **state)
{
    (void)state;
    struct probe probe;
    probe_init(&probe);
    struct ps_error err = {0};
    struct ps_rpc_server *server = NULL;
    struct ps_rpc_server_config config =
        config_with(&probe, server_id.certificate_pem, server_id.key_pem, authority.certificate_pem);
    assert_int_equal(ps_rpc_server_start(&config, &server, &err), 0);
    const char *ca = authority.certificate_pem;
    assert_int_equal(call_with(server, ca, client_id.certificate_pem, client_id.key_pem, &err), 0);
    assert_int_equal(call_with(server, ca, NULL, NULL, &err), PS_UNAVAILABLE);
    assert_int_equal(call_with(server, ca, stranger.certificate_pem, stranger.key_pem, &err), PS_UNAVAILABLE);
    assert_int_equal(atomic_load(&probe.handled), 1);
    ps_rpc_server_free(server);
    probe_done(&probe);
}

static void test_bad_pem_is_named(void **state)
{
    (void)state;
    const char *cert = server_id.certificate_pem, *key = server_id.key_pem, *ca = authority.certificate_pem;
    char *cut = strdup(cert), *two = NULL, *spoiled = NULL;
    strcpy(cut + strlen(cut) / 2, "\n");
    assert_true(asprintf(&two, "%s%s", cert, ca) > 0);
    assert_true(asprintf(&spoiled, "%s%s", cert, cut) > 0);
    const struct {
        const char *cert, *key, *ca, *says; /* NULL: good */
    } cases[] = {
        {cert, key, ca, NULL},
        {two, key, two, NULL}, /* a chain */
        {"garbage", key, NULL, "certificate is no PEM"},
        {"", key, NULL, "certificate is no PEM"},
        {cut, key, NULL, "certificate is no PEM"},
        {spoiled, key, NULL, "certificate is no PEM"},
        {cert, "garbage", NULL, "private key is no PEM"},
        {cert, cert, NULL, "private key is no PEM"},
        {cert, client_id.key_pem, NULL, "does not belong"},
        {cert, key, "garbage", "authority"},
        {cert, key, key, "authority"},
        {cert, NULL, NULL, "both"},
        {NULL, key, NULL, "both"},
        {NULL, NULL, ca, "both"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct ps_error err = {0};
        struct ps_rpc_server *server = NULL;
        struct ps_rpc_server_config config = config_with(NULL, cases[i].cert, cases[i].key, cases[i].ca);
        int code = ps_rpc_server_start(&config, &server, &err);
        assert_int_equal(code, cases[i].says ? PS_INVALID_ARGUMENT : 0);
        if (cases[i].says)
            assert_non_null(strstr(err.message, cases[i].says));
        ps_rpc_server_free(server);
    }
    struct ps_rpc_channel *channel = NULL;
    struct ps_error err = {0};
    struct ps_rpc_channel_config client = {.target = "127.0.0.1:1", .tls_ca = "garbage"};
    assert_int_equal(ps_rpc_channel_open(&client, &channel, &err), PS_INVALID_ARGUMENT);
    assert_non_null(strstr(err.message, "authority"));
    client.tls_ca = ca;
    client.tls_cert = cert;
    assert_int_equal(ps_rpc_channel_open(&client, &channel, &err), PS_INVALID_ARGUMENT);
    client.tls_key = client_id.key_pem;
    assert_int_equal(ps_rpc_channel_open(&client, &channel, &err), PS_INVALID_ARGUMENT);
    client.tls_ca = NULL;
    client.tls_key = key;
    assert_int_equal(ps_rpc_channel_open(&client, &channel, &err), PS_INVALID_ARGUMENT);
    free(cut);
    free(two);
    free(spoiled);
}

/* Nobody is asked for a passphrase at the terminal. */
static void test_locked_key(void **state)
{
    (void)state;
    BIO *bio = BIO_new(BIO_s_mem());
    assert_true(PEM_write_bio_PrivateKey(bio, server_id.key, EVP_aes_128_cbc(), NULL, 0, NULL, "secret"));
    char *locked = take(bio);
    struct ps_error err = {0};
    assert_int_equal(ps_check_pem(server_id.certificate_pem, locked, NULL, &err), PS_INVALID_ARGUMENT);
    assert_non_null(strstr(err.message, "passphrase"));
    free(locked);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tls),
        cmocka_unit_test(test_mutual_tls),
        cmocka_unit_test(test_bad_pem_is_named),
        cmocka_unit_test(test_locked_key),
    };
    return cmocka_run_group_tests(tests, make_all, drop_all);
}
