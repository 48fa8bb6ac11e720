package driverroot_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// buildStatic builds a program that needs no library: it prints whether a file
// exists, and its environment.
func buildStatic(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	source := `package main

import (
	"fmt"
	"os"
	"strings"
)

func main() {
	if _, err := os.Stat(os.Args[1]); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println(os.Args[1], strings.Join(os.Environ(), " "))
}
`
	if err := os.WriteFile(filepath.Join(dir, "main.go"), []byte(source), 0o644); err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(dir, "program")
	cmd := exec.CommandContext(t.Context(), "go", "build", "-o", program, filepath.Join(dir, "main.go"))
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build: %v: %s", err, out)
	}
	return program
}
