provider "google" {
  project = "p"
}

variables {
  site     = { name = "gcp-eu", region = "europe-west4", machine_types = ["g2-standard-8"], gpu = { type = "nvidia-l4", count = 1 }, min = 0, max = 4 }
  image    = "example.com/engine@sha256:0000000000000000000000000000000000000000000000000000000000000000"
  model    = "some/model"
  gateways = ["a.gateway.mico.example.com:8443", "b.gateway.mico.example.com:8443"]
  token    = "a-token-for-a-test"
  secrets  = { HF_TOKEN = "a-token-for-a-hub" }
  project  = "p"
}

run "site" {
  assert {
    condition     = output.pool.role == "engine" && output.pool.cloud == "gcp" && output.pool.endpoint == null
    error_message = "a site is a pool of engines that nobody reaches"
  }
  assert {
    condition     = google_secret_manager_secret_version.site.secret_data_wo == null
    error_message = "the token is in no state"
  }
  assert {
    condition = alltrue([for line in [
      "MICO_SITE_POOL=gcp-eu", "MICO_SITE_CLOUD=gcp", "MICO_SITE_REGION=europe-west4", "MICO_SITE_TLS=true", "MICO_SITE_MODEL=some/model",
      "MICO_SITE_GATEWAYS=a.gateway.mico.example.com:8443,b.gateway.mico.example.com:8443",
    ] : strcontains(module.machine.user_data, line)])
    error_message = "the engine is told who and where it is, what it serves and whom to dial"
  }
  assert {
    condition     = !strcontains(module.machine.user_data, "a-token-for-a-test")
    error_message = "user data can be read by many"
  }
}
