/* SPDX-License-Identifier: Apache-2.0
 * The Probe service's Echo and Count on gRPC's own C++ server (synchronous, as most are written): what
 * rpc_noop compares with. Prints its port, ends when its input does. */
#include <cstdio>
#include <grpcpp/grpcpp.h>

#include "paramsync/test/v1/probe.grpc.pb.h"

using paramsync::test::v1::Note;

class ProbeService final : public paramsync::test::v1::Probe::Service
{
    grpc::Status Echo(grpc::ServerContext *, const Note *request, Note *response) override
    {
        *response = *request;
        return grpc::Status::OK;
    }
    grpc::Status Count(grpc::ServerContext *, const Note *request, grpc::ServerWriter<Note> *writer) override
    {
        for (int64_t i = 1; i <= request->number(); i++) {
            Note note;
            note.set_number(i);
            note.set_data(request->data());
            if (!writer->Write(note))
                return grpc::Status::CANCELLED;
        }
        return grpc::Status::OK;
    }
};

int main()
{
    ProbeService service;
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&service);
    auto server = builder.BuildAndStart();
    std::printf("%d\n", port);
    std::fflush(stdout);
    while (std::getchar() != EOF)
        ;
    server->Shutdown();
    return 0;
}
