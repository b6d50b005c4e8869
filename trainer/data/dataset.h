/* SPDX-License-Identifier: Apache-2.0
 * Labelled 32 x 32 colour images in memory: CIFAR-10's python and binary versions (in a folder or a .tar.gz),
 * and the sample's random set. Format: https://www.cs.toronto.edu/~kriz/cifar.html */
#ifndef PARAMSYNC_DATA_DATASET_H
#define PARAMSYNC_DATA_DATASET_H

#include "services/base/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    PS_IMAGE_SIDE = 32,
    PS_IMAGE_CHANNELS = 3,
    PS_IMAGE_VALUES = 3 * 32 * 32, /* per image: 1024 red, 1024 green, 1024 blue, in rows */
    PS_CIFAR_CLASSES = 10,
    PS_CIFAR_RECORD = 1 + PS_IMAGE_VALUES,
};

struct ps_split {
    size_t count;
    uint8_t *pixels; /* [count, 3, 32, 32]; NULL in the random set */
    float *floats;   /* the same shape; NULL but in the random set */
    uint8_t *labels; /* [count] */
    size_t capacity; /* in images; used while the set is being read */
};

struct ps_dataset {
    struct ps_split train, test;
    int classes;
    /* 32 hexadecimal digits and a NUL. Depends on the images, their labels and on which split they are in,
     * not on the order of records, files or splits' parts, nor on the form they were stored in. Not
     * cryptographic. */
    char hash[33];
    /* What accuracies on this set are to be called: "CIFAR-10, JPEG re-encoded" where known records are met
     * (see dataset.c), a note of the folder's dataset-name.txt, else "CIFAR-10 format, data hash <8 digits>".
     */
    char name[128];
    char source[512]; /* where it was read, for people */
};

/* url: a folder that holds cifar-10-batches-py or cifar-10-batches-bin or their .tar.gz, one of these
 * folders, or the .tar.gz itself. Every batch file holds any whole number of records, at least one. Messages
 * name the file, the record and what is wrong. Free with ps_dataset_free. */
int ps_dataset_load(const char *url, struct ps_dataset **ret, struct ps_error *err);

/* The sample's random set: 5000 training and 1000 test images of standard normal values, 10 outputs, labels
 * half 0 and half 1, shuffled. A function of the seed. */
int ps_dataset_custom(uint64_t seed, struct ps_dataset **ret, struct ps_error *err);

/* Keeps the first images of each split, as many as given (0: all); hash and name then speak of the part.
 * INVALID_ARGUMENT names the flag where there are not as many. */
int ps_dataset_limit(struct ps_dataset *set, size_t train, size_t test, struct ps_error *err);

struct ps_dataset *ps_dataset_free(struct ps_dataset *set); /* takes NULL, returns NULL */

/* For readers. Makes room for n more images and returns the index of the first; -1 when out of memory. */
ptrdiff_t ps_split_extend(struct ps_split *split, size_t n);
/* Computes hash and name of a set whose splits are filled. note: the folder's own name for it, or NULL. */
void ps_dataset_identify(struct ps_dataset *set, const char *note);
/* One record's hash, the unit of both: split 0 is train, 1 test. */
uint64_t ps_record_hash(const uint8_t *pixels, unsigned label, unsigned split);

#endif
