/* SPDX-License-Identifier: Apache-2.0 */
#include "services/base/pem.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <string.h>

/* The first certificate of the text; all of them must be readable. NULL: bad. */
static X509 *read_certificates(const char *text)
{
    BIO *bio = BIO_new_mem_buf(text, -1);
    X509 *first = NULL, *next;
    while (bio && (next = PEM_read_bio_X509(bio, NULL, NULL, NULL))) {
        if (first)
            X509_free(next);
        else
            first = next;
    }
    /* Reading stops at the end of the text, or at something that is no certificate. */
    if (first && ERR_GET_REASON(ERR_peek_last_error()) != PEM_R_NO_START_LINE) {
        X509_free(first);
        first = NULL;
    }
    ERR_clear_error();
    BIO_free(bio);
    return first;
}

/* A key that is locked by a passphrase is refused, not asked about at the terminal. */
static int no_passphrase(char *buffer, int size, int writing, void *user)
{
    (void)buffer, (void)size, (void)writing, (void)user;
    return -1;
}

int ps_check_pem(const char *cert, const char *key, const char *ca, struct ps_error *err)
{
    int code = 0;
    X509 *certificate = cert ? read_certificates(cert) : NULL;
    EVP_PKEY *private_key = NULL;
    if (cert && !certificate)
        code = ps_fail(err, PS_INVALID_ARGUMENT, "the TLS certificate is no PEM certificate");
    if (code == 0 && key) {
        BIO *bio = BIO_new_mem_buf(key, -1);
        private_key = bio ? PEM_read_bio_PrivateKey(bio, NULL, no_passphrase, NULL) : NULL;
        BIO_free(bio);
        if (!private_key)
            code = ps_fail(err, PS_INVALID_ARGUMENT,
                           "the TLS private key is no PEM key, or is locked by a passphrase");
    }
    if (certificate && private_key && !X509_check_private_key(certificate, private_key))
        code = ps_fail(err, PS_INVALID_ARGUMENT, "the TLS private key does not belong to the certificate");
    if (code == 0 && ca) {
        X509 *authority = read_certificates(ca);
        if (!authority)
            code = ps_fail(err, PS_INVALID_ARGUMENT, "the TLS authority (CA) is no PEM certificate");
        X509_free(authority);
    }
    EVP_PKEY_free(private_key);
    X509_free(certificate);
    ERR_clear_error();
    return code;
}
