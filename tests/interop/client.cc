/* SPDX-License-Identifier: Apache-2.0
 * gRPC's interop cases (https://github.com/grpc/grpc/blob/master/doc/interop-test-descriptions.md, those that
 * a server without gRPC's own test protos can be asked) by gRPC's C++ library, against the Probe service of
 * our runtime. Prints one line for each case; exit 1 if one failed. */
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <string>
#include <thread>
#include <vector>

#include "paramsync/test/v1/probe.grpc.pb.h"

using grpc::ClientContext;
using grpc::Status;
using grpc::StatusCode;
using paramsync::test::v1::Note;
using paramsync::test::v1::Probe;

static int failures;

static void check(const char *name, bool good, const std::string &why = "")
{
    std::printf("%s %s%s%s\n", good ? "ok" : "FAILED", name, good || why.empty() ? "" : ": ",
                good ? "" : why.c_str());
    failures += !good;
}

static std::string told(const Status &status)
{
    return std::to_string(status.error_code()) + " \"" + status.error_message() + "\"";
}

static void within(ClientContext &context, double seconds)
{
    context.set_deadline(std::chrono::system_clock::now() +
                         std::chrono::milliseconds(static_cast<int>(seconds * 1000)));
}

static void unary(Probe::Stub &stub)
{
    {
        ClientContext context;
        within(context, 20);
        Note answer;
        Status status = stub.Echo(&context, Note(), &answer);
        check("empty_unary", status.ok() && answer.ByteSizeLong() == 0, told(status));
    }
    for (bool packed : {false, true}) {
        ClientContext context;
        within(context, 30);
        if (packed)
            context.set_compression_algorithm(GRPC_COMPRESS_GZIP);
        Note request, answer;
        request.set_data(std::string(271828, '\0'));
        request.set_number(314159);
        Status status = stub.Echo(&context, request, &answer);
        check(packed ? "client_compressed_unary" : "large_unary",
              status.ok() && answer.data() == request.data() && answer.number() == 314159, told(status));
    }
}

static void streams(Probe::Stub &stub)
{
    {
        ClientContext context;
        within(context, 20);
        Note answer;
        auto writer = stub.Sum(&context, &answer);
        for (int n : {27182, 8, 1828, 45904}) {
            Note note;
            note.set_number(n);
            writer->Write(note);
        }
        writer->WritesDone();
        Status status = writer->Finish();
        check("client_streaming", status.ok() && answer.number() == 74922, told(status));
    }
    {
        ClientContext context;
        within(context, 20);
        Note request, note;
        request.set_number(4);
        request.set_data(std::string(58979, 'x'));
        auto reader = stub.Count(&context, request);
        int64_t count = 0;
        bool in_order = true;
        while (reader->Read(&note))
            in_order = in_order && note.number() == ++count;
        Status status = reader->Finish();
        check("server_streaming", status.ok() && in_order && count == 4, told(status));
    }
    {
        ClientContext context;
        within(context, 20);
        auto stream = stub.Chat(&context);
        bool good = true;
        for (const char *text : {"a", "bb", "ccc", "dddd"}) { /* each answer before the next request */
            Note note, answer;
            note.set_text(text);
            good = good && stream->Write(note) && stream->Read(&answer) && answer.text() == text;
        }
        stream->WritesDone();
        Status status = stream->Finish();
        check("ping_pong", good && status.ok(), told(status));
    }
    {
        ClientContext context;
        within(context, 20);
        auto stream = stub.Chat(&context);
        stream->WritesDone();
        Note answer;
        bool any = stream->Read(&answer);
        Status status = stream->Finish();
        check("empty_stream", !any && status.ok(), told(status));
    }
}

static void endings(Probe::Stub &stub)
{
    {
        ClientContext context;
        Note answer;
        auto writer = stub.Sum(&context, &answer);
        context.TryCancel();
        Status status = writer->Finish();
        check("cancel_after_begin", status.error_code() == StatusCode::CANCELLED, told(status));
    }
    {
        ClientContext context;
        within(context, 20);
        auto stream = stub.Chat(&context);
        Note note, answer;
        note.set_text("one");
        bool first = stream->Write(note) && stream->Read(&answer);
        context.TryCancel();
        Status status = stream->Finish();
        check("cancel_after_first_response", first && status.error_code() == StatusCode::CANCELLED,
              told(status));
    }
    {
        ClientContext context;
        within(context, 0.1);
        Note request, answer;
        request.set_text("wait");
        Status status = stub.Echo(&context, request, &answer);
        check("timeout_on_sleeping_server", status.error_code() == StatusCode::DEADLINE_EXCEEDED,
              told(status));
    }
    for (const char *message :
         {"test status message",
          "\t\ntest with whitespace\r\nand Unicode BMP \xe2\x98\xba and non-BMP \xf0\x9f\x98\x88\t\n"}) {
        ClientContext context;
        within(context, 20);
        Note request, answer;
        request.set_text("status");
        request.set_number(-2);
        request.add_words(message);
        Status status = stub.Echo(&context, request, &answer);
        check(*message == 't' ? "status_code_and_message" : "special_status_message",
              status.error_code() == StatusCode::UNKNOWN && status.error_message() == message, told(status));
    }
    {
        ClientContext context;
        within(context, 20);
        context.AddMetadata("x-grpc-test-echo-initial", "test_initial_metadata_value");
        Note request, answer;
        request.set_text("metadata");
        request.add_words("x-grpc-test-echo-initial");
        Status status = stub.Echo(&context, request, &answer);
        check("custom_metadata: up", status.ok() && answer.text() == "test_initial_metadata_value",
              told(status));
    }
    {
        ClientContext context;
        within(context, 20);
        Note request, answer;
        request.set_text("trailer");
        request.add_words("x-grpc-test-trailing");
        request.add_words("value");
        Status status = stub.Echo(&context, request, &answer);
        auto found = context.GetServerTrailingMetadata().find("x-grpc-test-trailing");
        check("custom_metadata: down",
              status.ok() && found != context.GetServerTrailingMetadata().end() && found->second == "value",
              told(status));
    }
}

static void unknown(const std::shared_ptr<grpc::Channel> &channel)
{
    const char *const cases[][2] = {{"unimplemented_method", "/paramsync.test.v1.Probe/Nothing"},
                                    {"unimplemented_service", "/nobody.Nobody/Nothing"}};
    for (const auto &one : cases) {
        grpc::GenericStub stub(channel);
        ClientContext context;
        within(context, 20);
        grpc::CompletionQueue queue;
        grpc::ByteBuffer request, answer;
        grpc::Slice slice("", 0);
        request = grpc::ByteBuffer(&slice, 1);
        auto call = stub.PrepareUnaryCall(&context, one[1], request, &queue);
        call->StartCall();
        Status status;
        call->Finish(&answer, &status, nullptr);
        void *tag;
        bool ok;
        queue.Next(&tag, &ok);
        check(one[0], status.error_code() == StatusCode::UNIMPLEMENTED, told(status));
        queue.Shutdown();
        while (queue.Next(&tag, &ok))
            ;
    }
}

/* Many calls at a time on one connection, each with an answer of its own. */
static void concurrent(Probe::Stub &stub)
{
    std::vector<std::thread> threads;
    std::vector<int> wrong(32, 0);
    for (int t = 0; t < 32; t++)
        threads.emplace_back([&, t] {
            for (int i = 0; i < 20; i++) {
                ClientContext context;
                within(context, 30);
                Note request, answer;
                request.set_number(t * 1000 + i);
                request.set_data(std::string(20000, static_cast<char>(t)));
                Status status = stub.Echo(&context, request, &answer);
                wrong[t] +=
                    !status.ok() || answer.number() != t * 1000 + i || answer.data() != request.data();
            }
        });
    int all = 0;
    for (int t = 0; t < 32; t++) {
        threads[t].join();
        all += wrong[t];
    }
    check("concurrent_large_unary", all == 0, std::to_string(all) + " of 640");
}

int main(int argc, char **argv)
{
    if (argc != 2)
        return 2;
    auto channel = grpc::CreateChannel(argv[1], grpc::InsecureChannelCredentials());
    auto stub = Probe::NewStub(channel);
    unary(*stub);
    streams(*stub);
    endings(*stub);
    unknown(channel);
    concurrent(*stub);
    return failures ? 1 : 0;
}
