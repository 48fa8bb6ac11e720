// Command crio-import imports an image archive into the store of CRI-O, which has no command for
// that. It is a program of this module because it must have the libraries of the same versions.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/containers/image/v5/copy"
	"github.com/containers/image/v5/docker/archive"
	"github.com/containers/image/v5/signature"
	imagestore "github.com/containers/image/v5/storage"
	"github.com/containers/image/v5/types"
	"github.com/containers/storage"
	"github.com/containers/storage/pkg/reexec"
)

func main() {
	if reexec.Init() { // the libraries unpack layers in a process of their own
		return
	}
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "crio-import:", err)
		os.Exit(1)
	}
}

func run(args []string) (err error) {
	if len(args) != 4 {
		return errors.New("usage: crio-import ROOT RUNROOT STORAGE-DRIVER ARCHIVE")
	}
	store, err := storage.GetStore(storage.StoreOptions{GraphRoot: args[0], RunRoot: args[1], GraphDriverName: args[2]})
	if err != nil {
		return fmt.Errorf("open the image store: %w", err)
	}
	reader, err := archive.NewReader(nil, args[3])
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, reader.Close()) }()
	images, err := reader.List()
	if err != nil {
		return err
	}
	policy, err := signature.NewPolicyContext(&signature.Policy{Default: signature.PolicyRequirements{signature.NewPRInsecureAcceptAnything()}})
	if err != nil {
		return err
	}
	for _, names := range images {
		for _, image := range names {
			if err := load(store, policy, image); err != nil {
				return err
			}
		}
	}
	return nil
}

func load(store storage.Store, policy *signature.PolicyContext, image types.ImageReference) error {
	if image.DockerReference() == nil {
		return errors.New("an image of the archive has no name")
	}
	name := image.DockerReference().String()
	target, err := imagestore.Transport.ParseStoreReference(store, name)
	if err != nil {
		return fmt.Errorf("name the image %s: %w", name, err)
	}
	if _, err := copy.Image(context.Background(), policy, target, image, nil); err != nil {
		return fmt.Errorf("import the image %s: %w", name, err)
	}
	return nil
}
