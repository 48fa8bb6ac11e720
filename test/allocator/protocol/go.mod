module github.com/tessera-dra/tessera/test/allocator/protocol

go 1.24.0
