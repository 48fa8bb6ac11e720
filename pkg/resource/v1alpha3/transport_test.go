package v1alpha3_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	jsonserializer "k8s.io/apimachinery/pkg/runtime/serializer/json"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	draclient "k8s.io/dynamic-resource-allocation/client"

	"github.com/tessera-dra/tessera/pkg/resource/v1alpha3"
)

// server answers for the paths that it has and notes the bodies sent to them. It
// answers others as kube-apiserver 1.31.4 does.
type server struct {
	paths map[string]string
	// codes that aren't 200, by path.
	codes map[string]int
	// form is the content type of the answers in paths; JSON if it is empty.
	form string

	mu   sync.Mutex
	sent []string
	seen []string
}

func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen = append(s.seen, r.Method+" "+r.URL.Path)
	answer, ok := s.paths[r.URL.Path]
	if !ok {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusNotFound)
		fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure",`+
			`"message":"the server could not find the requested resource","reason":"NotFound","details":{},"code":404}`)
		return
	}
	s.sent = append(s.sent, string(body))
	if s.form == "" {
		s.form = runtime.ContentTypeJSON
	}
	w.Header().Set("Content-Type", s.form)
	if code, ok := s.codes[r.URL.Path]; ok {
		w.WriteHeader(code)
	}
	if answer == "echo" {
		answer = string(body)
	}
	fmt.Fprint(w, answer)
}

// connect returns a client that sends and wants protobuf, as the plugin's does.
func connect(t *testing.T, s *server) kubernetes.Interface {
	t.Helper()
	http := httptest.NewServer(s)
	t.Cleanup(http.Close)
	config := &rest.Config{Host: http.URL, QPS: -1, ContentConfig: rest.ContentConfig{
		ContentType: runtime.ContentTypeProtobuf, AcceptContentTypes: runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON,
	}}
	config.Wrap(v1alpha3.Transport)
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	return client
}

const alphaPath = "/apis/resource.k8s.io/v1alpha3"

// compact returns JSON in one form.
func compact(t *testing.T, in string) string {
	t.Helper()
	var value any
	d := json.NewDecoder(strings.NewReader(in))
	d.UseNumber()
	if err := d.Decode(&value); err != nil {
		t.Fatalf("%v in %s", err, in)
	}
	out, err := json.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// aSlice is a slice as of v1, and as the server of Kubernetes 1.31 has to get it.
func aSlice() (*resourceapi.ResourceSlice, string) {
	return &resourceapi.ResourceSlice{
			ObjectMeta: metav1.ObjectMeta{Name: "node-a-gpu-0"},
			Spec: resourceapi.ResourceSliceSpec{
				Driver: "gpu.nvidia.com", NodeName: new("node-a"),
				Pool: resourceapi.ResourcePool{Name: "node-a", Generation: 3, ResourceSliceCount: 1},
				Devices: []resourceapi.Device{{
					Name:       "gpu-980fb007",
					Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"minor": {IntValue: new(int64(1) << 60)}, "type": {StringValue: new("gpu")}},
					Capacity:   map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: resource.MustParse("80Gi")}},
				}},
			},
		}, `{"apiVersion":"resource.k8s.io/v1alpha3","kind":"ResourceSlice","metadata":{"name":"node-a-gpu-0"},
		"spec":{"driver":"gpu.nvidia.com","nodeName":"node-a","pool":{"name":"node-a","generation":3,"resourceSliceCount":1},
		"devices":[{"name":"gpu-980fb007","basic":{"attributes":{"minor":{"int":1152921504606846976},"type":{"string":"gpu"}},"capacity":{"memory":"80Gi"}}}]}}`
}

// TestCreateSlice checks a slice on its way to the server and back.
func TestCreateSlice(t *testing.T) {
	s := &server{paths: map[string]string{alphaPath + "/resourceslices": "echo"}}
	slice, want := aSlice()
	stored, err := draclient.New(connect(t, s)).ResourceSlices().Create(t.Context(), slice, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if len(s.sent) != 1 {
		t.Fatalf("sent %v", s.sent)
	}
	if diff := cmp.Diff(compact(t, want), compact(t, s.sent[0])); diff != "" {
		t.Errorf("sent (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(slice.Spec, stored.Spec); diff != "" {
		t.Errorf("stored (-want +got):\n%s", diff)
	}
}

// TestDroppedFields checks that a client can see which fields the server doesn't store.
func TestDroppedFields(t *testing.T) {
	s := &server{paths: map[string]string{alphaPath + "/resourceslices": "echo"}}
	slice, _ := aSlice()
	one := resource.MustParse("1")
	slice.Spec.Devices[0].Capacity["memory"] = resourceapi.DeviceCapacity{Value: one, RequestPolicy: &resourceapi.CapacityRequestPolicy{Default: &one}}
	stored, err := draclient.New(connect(t, s)).ResourceSlices().Create(t.Context(), slice, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if got := stored.Spec.Devices[0].Capacity["memory"]; got.RequestPolicy != nil || got.Value.Cmp(one) != 0 {
		t.Errorf("stored %v", got)
	}
}

const aClaim = `{"kind":"ResourceClaim","apiVersion":"resource.k8s.io/v1alpha3","metadata":{"name":"claim","namespace":"default","uid":"1-2"},
	"spec":{"devices":{"requests":[
		{"name":"mine","deviceClassName":"gpu.nvidia.com","allocationMode":"ExactCount","count":1},
		{"name":"look","deviceClassName":"gpu.nvidia.com","allocationMode":"All","adminAccess":true}]}},
	"status":{"allocation":{
		"devices":{"results":[
			{"request":"mine","driver":"gpu.nvidia.com","pool":"node-a","device":"gpu-0"},
			{"request":"look","driver":"gpu.nvidia.com","pool":"node-a","device":"gpu-1"}],
		"config":[{"source":"FromClass","opaque":{"driver":"gpu.nvidia.com","parameters":{"kind":"GpuConfig"}}}]},
		"nodeSelector":{"nodeSelectorTerms":[{"matchFields":[{"key":"metadata.name","operator":"In","values":["node-a"]}]}]}},
		"reservedFor":[{"resource":"pods","name":"pod","uid":"3-4"}]}}`

// aClassicClaim has been allocated by a control plane controller.
const aClassicClaim = `{"kind":"ResourceClaim","apiVersion":"resource.k8s.io/v1alpha3","metadata":{"name":"classic","namespace":"default"},
	"spec":{"controller":"gpu.nvidia.com","devices":{"requests":[{"name":"mine","deviceClassName":"gpu.nvidia.com"}]}},
	"status":{"allocation":{"controller":"gpu.nvidia.com","devices":{}}}}`

func checkClaim(t *testing.T, c *resourceapi.ResourceClaim) {
	t.Helper()
	want := []resourceapi.DeviceRequestAllocationResult{
		{Request: "mine", Driver: "gpu.nvidia.com", Pool: "node-a", Device: "gpu-0"},
		{Request: "look", Driver: "gpu.nvidia.com", Pool: "node-a", Device: "gpu-1", AdminAccess: new(true)},
	}
	if diff := cmp.Diff(want, c.Status.Allocation.Devices.Results); diff != "" {
		t.Errorf("results (-want +got):\n%s", diff)
	}
	if c.UID != "1-2" || len(c.Status.ReservedFor) != 1 || len(c.Status.Allocation.NodeSelector.NodeSelectorTerms) != 1 ||
		string(c.Status.Allocation.Devices.Config[0].Opaque.Parameters.Raw) != `{"kind":"GpuConfig"}` {
		t.Errorf("got %v", c)
	}
}

func TestReadClaims(t *testing.T) {
	const list = alphaPath + "/resourceclaims"
	const one = alphaPath + "/namespaces/default/resourceclaims/claim"
	s := &server{paths: map[string]string{
		one: aClaim,
		list: fmt.Sprintf(`{"kind":"ResourceClaimList","apiVersion":"resource.k8s.io/v1alpha3","metadata":{"resourceVersion":"7"},"items":[%s,%s]}`,
			strings.Replace(aClaim, `"kind":"ResourceClaim","apiVersion":"resource.k8s.io/v1alpha3",`, "", 1),
			strings.Replace(aClassicClaim, `"kind":"ResourceClaim","apiVersion":"resource.k8s.io/v1alpha3",`, "", 1)),
	}}
	client := draclient.New(connect(t, s))
	got, err := client.ResourceClaims("default").Get(t.Context(), "claim", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	checkClaim(t, got)
	all, err := client.ResourceClaims("").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if len(all.Items) != 2 || all.ResourceVersion != "7" {
		t.Fatalf("got %v", all)
	}
	checkClaim(t, &all.Items[0])
	if classic := all.Items[1]; classic.Name != "classic" || classic.Status.Allocation == nil || len(classic.Status.Allocation.Devices.Results) != 0 {
		t.Errorf("got %v", classic)
	}
}

func TestWatch(t *testing.T) {
	bookmark := `{"type":"BOOKMARK","object":{"kind":"ResourceClaim","apiVersion":"resource.k8s.io/v1alpha3","metadata":{"resourceVersion":"12"},"spec":{"devices":{}}}}`
	expired := `{"type":"ERROR","object":{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","reason":"Expired","code":410}}`
	s := &server{paths: map[string]string{
		alphaPath + "/resourceclaims": fmt.Sprintf(`{"type":"ADDED","object":%s}%s%s`, aClaim, "\n"+bookmark+"\n", expired+"\n"),
	}}
	w, err := draclient.New(connect(t, s)).ResourceClaims("").Watch(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	var events []watch.Event
	for e := range w.ResultChan() {
		events = append(events, e)
	}
	if len(events) != 3 || events[0].Type != watch.Added || events[1].Type != watch.Bookmark || events[2].Type != watch.Error {
		t.Fatalf("got %v", events)
	}
	claim, ok := events[0].Object.(*resourceapi.ResourceClaim)
	if !ok {
		t.Fatalf("got a %T", events[0].Object)
	}
	checkClaim(t, claim)
	if mark, ok := events[1].Object.(*resourceapi.ResourceClaim); !ok || mark.ResourceVersion != "12" {
		t.Errorf("bookmark %v", events[1].Object)
	}
	if err := apierrors.FromObject(events[2].Object); !apierrors.IsResourceExpired(err) {
		t.Errorf("error %v", err)
	}
}

func TestDeleteWithPreconditions(t *testing.T) {
	const path = alphaPath + "/resourceslices/s"
	s := &server{paths: map[string]string{path: `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Conflict","code":409}`}, codes: map[string]int{path: 409}}
	err := draclient.New(connect(t, s)).ResourceSlices().Delete(t.Context(), "s", metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions("u")})
	if !apierrors.IsConflict(err) {
		t.Errorf("error %v", err)
	}
	want := `{"apiVersion":"resource.k8s.io/v1alpha3","kind":"DeleteOptions","preconditions":{"uid":"u"}}`
	if len(s.sent) != 1 || compact(t, s.sent[0]) != want {
		t.Errorf("sent %v", s.sent)
	}
}

// TestApplyStatus checks a body that isn't decoded by type. The server answers an
// apply with a field that it doesn't know with an internal error.
func TestApplyStatus(t *testing.T) {
	const path = "/namespaces/default/resourceclaims/claim/status"
	s := &server{paths: map[string]string{alphaPath + path: aClaim}}
	stored, err := connect(t, s).ResourceV1beta1().RESTClient().Patch(types.ApplyPatchType).
		AbsPath("/apis/resource.k8s.io/v1beta1" + path).
		Body([]byte(`{"apiVersion":"resource.k8s.io/v1beta1","kind":"ResourceClaim","status":{"devices":[]}}`)).DoRaw(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if want := `{"apiVersion":"resource.k8s.io/v1alpha3","kind":"ResourceClaim","status":{}}`; len(s.sent) != 1 || s.sent[0] != want {
		t.Errorf("sent %v", s.sent)
	}
	if !bytes.Contains(stored, []byte(`"apiVersion":"resource.k8s.io/v1beta1"`)) {
		t.Errorf("got %s", stored)
	}
}

func TestDiscovery(t *testing.T) {
	s := &server{paths: map[string]string{
		alphaPath: `{"kind":"APIResourceList","apiVersion":"v1","groupVersion":"resource.k8s.io/v1alpha3","resources":[{"name":"resourceslices","kind":"ResourceSlice","verbs":["get"]}]}`,
	}}
	list, err := connect(t, s).Discovery().ServerResourcesForGroupVersion("resource.k8s.io/v1beta1")
	if err != nil {
		t.Fatal(err)
	}
	if list.GroupVersion != "resource.k8s.io/v1beta1" || list.APIResources[0].Name != "resourceslices" {
		t.Errorf("got %v", list)
	}
}

// TestNotServed checks a server without the API, and one without the claim.
func TestNotServed(t *testing.T) {
	s := &server{}
	if _, err := connect(t, s).ResourceV1beta1().ResourceClaims("default").Get(t.Context(), "claim", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("without the API: %v", err)
	}
	const path = alphaPath + "/namespaces/default/resourceclaims/claim"
	s = &server{paths: map[string]string{path: `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"NotFound","details":{"name":"claim","group":"resource.k8s.io","kind":"x"},"code":404,"message":"gone"}`}, codes: map[string]int{path: 404}}
	if _, err := connect(t, s).ResourceV1beta1().ResourceClaims("default").Get(t.Context(), "claim", metav1.GetOptions{}); !apierrors.IsNotFound(err) || err.Error() != "gone" {
		t.Errorf("without the claim: %v", err)
	}
}

// TestNewerServer checks that nothing changes with a server that has v1beta1, also
// for objects that it doesn't have, in the form that it answers in.
func TestNewerServer(t *testing.T) {
	const path = "/apis/resource.k8s.io/v1beta1/resourceslices/s"
	missing := &metav1.Status{
		TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure, Reason: metav1.StatusReasonNotFound, Code: http.StatusNotFound,
		Details: &metav1.StatusDetails{Name: "s", Group: "resource.k8s.io", Kind: "x"},
	}
	for form, serializer := range map[string]runtime.Encoder{
		runtime.ContentTypeJSON:     jsonserializer.NewSerializerWithOptions(jsonserializer.DefaultMetaFactory, scheme.Scheme, scheme.Scheme, jsonserializer.SerializerOptions{}),
		runtime.ContentTypeProtobuf: protobuf.NewSerializer(scheme.Scheme, scheme.Scheme),
	} {
		t.Run(form, func(t *testing.T) {
			answer, err := runtime.Encode(serializer, missing)
			if err != nil {
				t.Fatal(err)
			}
			s := &server{paths: map[string]string{path: string(answer)}, codes: map[string]int{path: 404}, form: form}
			if _, err := connect(t, s).ResourceV1beta1().ResourceSlices().Get(t.Context(), "s", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
				t.Errorf("error %v", err)
			}
			if diff := cmp.Diff([]string{"GET " + path}, s.seen); diff != "" {
				t.Errorf("requests (-want +got):\n%s", diff)
			}
		})
	}
}
