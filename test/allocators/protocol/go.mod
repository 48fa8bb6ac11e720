module github.com/tessera-dra/tessera/test/allocators/protocol

go 1.24.0
