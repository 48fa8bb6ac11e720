// Testlog shows what a person wants to see of go test -json, keeps all of it in
// a file, and lists the slowest tests.
//
//	go test -json ./... | testlog FILE
//	testlog -slowest 10 FILE...
package main

import (
	"flag"
	"fmt"
	"io"
	"os"
)

func main() {
	count := flag.Int("slowest", 0, "list so many of the slowest tests in the files, and read nothing else")
	flag.Parse()
	if err := run(os.Stdin, os.Stdout, *count, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "testlog:", err)
		os.Exit(1)
	}
}

func run(in io.Reader, out io.Writer, count int, files []string) error {
	if count > 0 {
		return slowest(out, count, files)
	}
	if len(files) != 1 {
		return fmt.Errorf("want one file to append to, got %q", files)
	}
	file, err := os.OpenFile(files[0], os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	if err := show(io.TeeReader(in, file), out); err != nil {
		return err
	}
	return file.Close()
}
