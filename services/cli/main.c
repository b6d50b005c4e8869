/* SPDX-License-Identifier: Apache-2.0
 * paramsync: the command line. */
#include "services/cli/cli.h"

#include "paramsync_version.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>

static const struct cli_command commands[] = {
    {"runs", "list the runs that the sidecar has recorded", cli_runs},
    {"show", "one run: settings, epochs, checkpoints", cli_show},
    {"watch", "follow a run while it trains", cli_watch},
    {"pull", "fetch a checkpoint, verified and resumable", cli_pull},
    {"push", "hand a checkpoint file to the sidecar", cli_push},
    {"compare", "time to target, speed-up, efficiency of runs side by side", cli_compare},
    {"gate", "pass or fail a run for CI: exit 0, 1, or 2 for \"cannot decide\"", cli_gate},
    {"baseline", "pin a run as the baseline that the gate holds others to", cli_baseline},
    {"tail", "record the printed lines of any training script", cli_tail},
    {"export", "a run for other programs: JSON, CSV, TensorBoard, PyTorch, ONNX", cli_export},
    {"import", "a TensorBoard, CSV or JSON lines file as a new run", cli_import},
    {"launch", "start a training's processes, on one node or several", cli_launch},
    {"plan", "from one card's measured step: what N cards on M nodes would take", cli_plan},
    {"doctor", "look at what is needed on this machine, and say what to do", cli_doctor},
};
enum { command_count = sizeof commands / sizeof *commands };

static void print_help(FILE *out)
{
    fputs("Example:\n"
          "  paramsync runs\n"
          "  paramsync compare single double --target 80%\n"
          "  paramsync gate double --min-accuracy 0.8 --max-time 20min\n"
          "\n"
          "Usage: paramsync COMMAND [RUN] [--sidecar HOST:PORT] [options]\n"
          "\n"
          "Commands:\n",
          out);
    for (size_t i = 0; i < command_count; i++)
        fprintf(out, "  %-10s%s\n", commands[i].name, commands[i].summary);
    fputs("\n"
          "A run is named by its id or its unique name. `paramsync COMMAND --help` tells\n"
          "the rest. PARAMSYNC_SIDECAR and PARAMSYNC_TOKEN stand in for the flags.\n",
          out);
}

static const struct cli_command *find(const char *name)
{
    for (size_t i = 0; i < command_count; i++)
        if (strcmp(commands[i].name, name) == 0)
            return &commands[i];
    return NULL;
}

int main(int argc, char **argv)
{
    signal(SIGPIPE, SIG_IGN); /* a closed pipe is an error of write, not a death */
    if (argc < 2) {
        print_help(stderr);
        return 2;
    }
    const char *word = argv[1];
    if (strcmp(word, "--version") == 0 || strcmp(word, "-V") == 0) {
        printf("paramsync %s\n", PARAMSYNC_VERSION);
        return fflush(stdout) ? 1 : 0;
    }
    if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0 || (strcmp(word, "help") == 0 && argc == 2)) {
        print_help(stdout);
        return fflush(stdout) ? 1 : 0;
    }
    if (strcmp(word, "help") == 0) {
        const struct cli_command *command = find(argv[2]);
        char help[] = "--help", *arguments[] = {argv[2], help, NULL};
        if (command)
            return command->run(2, arguments);
        word = argv[2];
    }
    const struct cli_command *command = find(word);
    if (!command) {
        struct ps_error err = {0};
        ps_fail(&err, PS_INVALID_ARGUMENT, "there is no such command; paramsync --help lists them all");
        return cli_complain(word[0] == '-' ? "COMMAND" : word, &err);
    }
    return command->run(argc - 1, argv + 1);
}
