// Command protogen generates the Go code of .proto files with protoc-gen-go and
// protoc-gen-go-grpc, which must be on the PATH, and without protoc: the files
// are compiled by a Go library.
//
// usage: protogen FILE.proto...   the Go files are written beside each
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/bufbuild/protocompile"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/pluginpb"
)

func main() {
	for _, file := range os.Args[1:] {
		if err := generate(context.Background(), file); err != nil {
			fmt.Fprintf(os.Stderr, "protogen: %s: %v\n", file, err)
			os.Exit(1)
		}
	}
}

// generate writes the output of both generators for a file without imports.
func generate(ctx context.Context, file string) error {
	compiler := protocompile.Compiler{
		Resolver:       &protocompile.SourceResolver{},
		SourceInfoMode: protocompile.SourceInfoStandard, // comments become Go comments
	}
	compiled, err := compiler.Compile(ctx, file)
	if err != nil {
		return err
	}
	for program, parameter := range map[string]string{
		"protoc-gen-go":      "paths=source_relative",
		"protoc-gen-go-grpc": "paths=source_relative",
	} {
		request := &pluginpb.CodeGeneratorRequest{
			FileToGenerate: []string{filepath.ToSlash(file)},
			Parameter:      &parameter,
			ProtoFile:      []*descriptorpb.FileDescriptorProto{protodesc.ToFileDescriptorProto(compiled[0])},
		}
		if err := run(ctx, program, request); err != nil {
			return fmt.Errorf("%s: %w", program, err)
		}
	}
	return nil
}

// run writes the files that the program answers with.
func run(ctx context.Context, program string, request *pluginpb.CodeGeneratorRequest) error {
	in, err := proto.Marshal(request)
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, program)
	cmd.Stdin, cmd.Stderr = bytes.NewReader(in), os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return err
	}
	var response pluginpb.CodeGeneratorResponse
	if err := proto.Unmarshal(out, &response); err != nil {
		return err
	}
	if response.GetError() != "" {
		return errors.New(response.GetError())
	}
	for _, f := range response.GetFile() {
		if err := os.WriteFile(f.GetName(), []byte(f.GetContent()), 0o644); err != nil {
			return err
		}
	}
	return nil
}
