/* SPDX-License-Identifier: Apache-2.0
 * embed FILE SYMBOL OUT.c: writes a C file that defines SYMBOL[] (with a NUL after the bytes) and
 * SYMBOL_size. */
#include <stdio.h>

int main(int argc, char **argv)
{
    if (argc != 4) {
        fprintf(stderr, "usage: embed FILE SYMBOL OUT.c\n");
        return 2;
    }
    FILE *in = fopen(argv[1], "rb");
    FILE *out = in ? fopen(argv[3], "wb") : NULL;
    if (!in || !out) {
        perror(in ? argv[3] : argv[1]);
        return 1;
    }
    fprintf(out, "#include <stddef.h>\nextern const unsigned char %s[];\nextern const size_t %s_size;\n",
            argv[2], argv[2]);
    fprintf(out, "const unsigned char %s[] = {\n", argv[2]);
    size_t size = 0;
    int byte;
    while ((byte = fgetc(in)) != EOF)
        fprintf(out, "%d,%s", byte, ++size % 24 ? "" : "\n");
    fprintf(out, "0};\nconst size_t %s_size = %zu;\n", argv[2], size);
    int bad = ferror(in) || ferror(out);
    fclose(in);
    return fclose(out) || bad;
}
